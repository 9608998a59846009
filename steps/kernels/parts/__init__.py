"""What kernels of several rooms share: weights, activation passes, epilogues, stream-K."""
