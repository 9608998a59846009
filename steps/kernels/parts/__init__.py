"""What kernels of several rooms share.

weights/                codes and scales of packed tiles, in registers
activations/            the passes that round or quantize A, and the layouts they write
epilogue/               from accumulators to C
exchange.py             what thread blocks show each other, each value with its flag beside it
stream_k.py             the stream-K scheduler (step 10)
split_k_reduction.py    partial sums and an arrival counter (step 10)
"""
