"""How kernels, calls and models are timed.

protocol.py      the regime, the GPU behind it, and what a time may be at least
loop.py          the loop: contestants take turns, round by round
products.py      data, launches and checks of a product that is timed
by_experts.py    the same of products of experts
by_chain.py      the same of two products, one of which makes the A of the other
bench.py         what is measured in which order, and what is left as it is
as_called.py     what a caller gets: gemm.plan and QuantLinear beside torch
experts.py       products of mixtures of experts beside torch's
cublas.py        cuBLAS through torch
torch_graphs.py  calls of torch as contestants
models/          tokens a second of this project's decoder
tune.py          totals at many M, by which gemm chooses
limits.py        what this GPU can do at most
"""
