"""From accumulators to C: partial sums of K added up, scales taken back, edges respected."""
