"""How kernels are timed: the protocol, A/B comparisons, limits of the GPU, bench and tuning."""
