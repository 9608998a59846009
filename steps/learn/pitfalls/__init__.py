"""The museum: twelve known bugs of quantized GEMM kernels, each caught by the checks here.

    make pitfalls       # the table and the stories

Each exhibit `pNN_*.py` has a story, a wrong kernel (or codec) and a right one; they differ in a
line or two. The museum runs both on the golden block and on small problems and says which layer
of the checks caught the wrong one. A bug that gets through is an error: the exhibits test the
tests.
"""

from steps.learn.pitfalls.exhibit import Finding, Pitfall, examine, pitfalls

__all__ = ["Finding", "Pitfall", "examine", "pitfalls"]
