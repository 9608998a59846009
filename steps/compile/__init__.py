"""From a kernel to machine code, with or without a GPU, and what is kept of it.

dry_run.py            the launches of a product, made on arrays that have no memory
compiler.py           machine code without a GPU or a driver
kernel_cache.py       compiled kernels on disk
kernel_key.py         the key by which one is found again
import_closure.py     the code that a module is made of, as a hash
parallel_compile.py   the kernels of a long run, by all cores
numba_shortcuts.py    what Numba repeats while it compiles, done once
"""
