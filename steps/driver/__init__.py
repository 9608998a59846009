"""Where launches run: the CUDA driver's side (loading, laying out arguments, tensor maps) and the
two machines, a GPU and the simulator.
"""
