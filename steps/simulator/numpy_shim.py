"""What numba-cuda 0.30.4 needs set right before its first use.

* `np.row_stack` was removed in NumPy 2.5, but numba-cuda 0.30.4 registers an overload for it at the
  first compile or launch and fails with AttributeError (numba-cuda issue 907; the fix was closed
  unmerged). It was an alias of `np.vstack`.
* Its import does `np.timedelta64("nat")`, which NumPy 2.5 deprecates; imported here under a filter,
  so that a program (or a test run) may make warnings errors.
* The low-occupancy warning is switched off: a kernel of one warp is a fine thing to check an
  instruction with, and in the measurements occupancy is a matter of the step's design, not of a
  warning.

Refused here: Numba's own simulator of CUDA, which has no PTX and claims a GPU.
"""

import warnings

import numpy as np

if not hasattr(np, "row_stack"):
    np.row_stack = np.vstack  # noqa: NPY201

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "The 'generic' unit for NumPy timedelta", DeprecationWarning)
    import numba.cuda
    from numba.cuda.core import config

if numba.cuda.implementation != "NVIDIA":
    raise ImportError(
        "numba.cuda is the one built into numba, not the numba-cuda package: install numba-cuda "
        "into this environment with pip (its redirector is a .pth file, unseen in PYTHONPATH)"
    )

if config.ENABLE_CUDASIM:
    raise ImportError(
        "unset NUMBA_ENABLE_CUDASIM: Numba's simulator cannot run these kernels; the project's own "
        "needs no variable"
    )

config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
