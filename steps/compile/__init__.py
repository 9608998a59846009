"""From a kernel to machine code, with or without a GPU, and the compiled kernels kept on disk.

dry_run.py            launches made on placeholders, arrays without memory
compiler.py           machine code without a GPU or a driver
kernel_cache.py       compiled kernels on disk
kernel_key.py         the key by which one is found again
import_closure.py     the code that a module is made of, as a hash
parallel_compile.py   kernels compiled by all cores, before they are launched or meanwhile
other_processes.py    the processes that do it
numba_shortcuts.py    work that Numba repeats while it compiles, done once
"""
