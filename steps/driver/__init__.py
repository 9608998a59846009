"""Where launches run: the two machines, and the CUDA driver below one of them.

machines.py          a GPU, or the simulator on any CPU
launcher.py          a launch by the driver's own call
encode_map.py        tensor maps among the parameters of a launch
kept.py              a thread-safe LRU cache of launches
"""
