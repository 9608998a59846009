"""Where launches run: the two machines, and the CUDA driver below one of them.

machines.py          Gpu, or Simulator on any CPU: arrays and launches
launcher.py          load -> Loaded: a launch by the driver's own call, compiled and laid out once
encode_map.py        tensor maps among the parameters of a launch

`Gpu.run` loads a launch and launches it. What is launched again and again is loaded once, by
`steps.product.prepared`.
"""
