"""One way for every product: a request is decided once, prepared once, and called with addresses.

gemm.py           `gemm` and `pack`
plan.py           `gemm.plan`: all that products of one shape need; a call only launches
operands.py       what the operands are, or an error of one sentence
request.py        a product that somebody wants, as data
choice.py         which kernel multiplies: the one named, the fastest measured, or a default
tuning_table.py   the times of each GPU by which it chooses
prepared.py       its launches, compiled and laid out before any address is known
"""
