"""Products of many tokens: kernels of mma.sync and wgmma, their tiles and rings."""
