"""`gemm`, `pack` and `plan`: argument checks, the choice of a step, launching."""
