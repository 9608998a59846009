"""A product, from a request to launches: the same four steps for every caller.

    Request        what is wanted: format, M, N, K, dtypes, bias, accuracy, perhaps a step
      | choose     the engineered kernel measured fastest there; a lesson where none of these runs
    Choice         that kernel, its family, how it reads A, what it writes, and why it was chosen
      | prepare    its launches, made on placeholders, compiled and loaded on the current GPU
    Prepared       launches without addresses; it owns no memory
      | call       the addresses of A, C and weights are put in, and the launches are queued

`gemm` and plans call a `gemm.Product`: a Choice and its Prepared, with checks of the arrays; packed
weights keep theirs by Request. The operator of torch (`steps.nn.operator`, for layers and for the
decoder's products) does the same in its own way, with memory of torch. What a decoder computes
between products (`steps.decoder.kernel_operations`) has no request: its launches are given to
`Prepared` directly. The parallel compiler takes a Choice as a recipe for its launches. NumPy
arrays, and so the simulator, need no preparation: `Choice.on` makes the launches on arrays of the
machine.

choice.py         Request; choose -> Choice: the kernel named, the fastest measured, or a default
tuning_table.py   the times of each GPU, by which `choose` decides
prepared.py       prepare -> Prepared: launches that a call gives addresses; Kept: a cache of them
operands.py       argument checks: what A, W, C and a bias are, or an error of one sentence
gemm.py           `gemm`, `pack`, and Product: a product of arrays on the GPU
plan.py           `gemm.plan`: a Product with memory of its own
experts.py        `experts`, `pack_experts`: the same steps for products with chosen experts
rows.py           weights as floats: `dequantize`, `get_rows`, columns of packed weights
"""
