"""From a kernel to machine code: compiling without a GPU, the cache of compiled kernels and its
key, and the dry run that makes a launch without memory.
"""
