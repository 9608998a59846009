"""Quantized layers for torch (optional): `QuantLinear`, `quantize_model`, the custom operator.

linear.py      the layer, and whole models
operator.py    the product as an operator of torch
shard.py       which part of a layer each rank of a group has
all_reduce.py  sums over the ranks
"""
