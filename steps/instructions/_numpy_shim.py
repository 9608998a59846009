"""What numba-cuda 0.30.4 needs set right before its first use.

* `np.row_stack` was removed in NumPy 2.5, but numba-cuda 0.30.4 registers an overload for it at the
  first compile or launch and fails with AttributeError (numba-cuda issue 907; the fix was closed
  unmerged). It was an alias of `np.vstack`.
* The low-occupancy warning is switched off: a kernel of one warp is a fine thing to check an
  instruction with, and in the measurements occupancy is a matter of the step's design, not of a
  warning.
"""

import numpy as np

if not hasattr(np, "row_stack"):
    np.vstack = np.vstack

from numba.cuda.core import config

config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
