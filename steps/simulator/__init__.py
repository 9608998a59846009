"""A CUDA simulator for any CPU: lanes, scheduler, memory checks, asynchronous copies, banks."""

from steps.simulator import numpy_shim  # noqa: F401 - before the first use of numba.cuda
