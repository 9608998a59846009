"""What callers launch: kernels with all formats, dtypes and biases, each taught by a lesson.

    prefill/    products of many tokens (steps 8 to 15)
    decode/     products of few tokens (steps 17 and 18)
    between/    what a decoder computes between its products
    parts/      what kernels of several rooms share: weights, activation passes, epilogues, stream-K

`steps.registry.KERNELS` lists the modules that define a `KERNEL`; `gemm` chooses among these. A
file's docstring names the lesson that teaches it. Constants that begin with H200 were measured on
one.
"""
