"""The engineered kernels: what callers launch, with all formats, dtypes and biases.

    prefill/    products of many tokens: KERNEL of steps 10, 11, 13, 14 and 15, and their parts
    decode/     products of few tokens: KERNEL of steps 17 and 18, and their parts
    between/    what a decoder computes between its products
    experts/    products of mixtures of experts, see `steps.product.experts`
    rows.py     rows of a quantized matrix as floats
    unpack.py   columns of packed weights as floats, for gradients
    parts/      what several rooms share: weights, activation passes, epilogues, stream-K

`steps.registry.KERNELS` lists the modules that define a `KERNEL`; `gemm` chooses among these, and
messages name each by the number of its lesson (`steps/stepNN_*.py`), which imports nothing from
here. Constants that begin with H200 were measured on one.
"""
