"""Quantized layers for torch (optional): `QuantLinear`, `quantize_model`, the custom operator.

linear.py      the layer, and whole models
operator.py    the product as an operator of torch
experts.py     experts of a mixture as a layer, and ggml's mul_mat_id
rows.py        rows of weights as floats; embeddings over blocks
gguf.py        models of transformers with the blocks of their GGUF files
ggml_kernels.py  the kernels that transformers asks for where it keeps a GGUF file packed
pretrained.py  models of transformers, quantized, through its save_pretrained and from_pretrained
adapters.py    adapters of PEFT: in one launch with their layer, or merged into it
lora.py        the layer that PEFT puts on a quantized one for the first
weight.py      what reads of a layer's `weight` get
kept.py        what is made of a tensor's values and kept as long as its memory
fsdp.py        layers under FSDP2: each rank holds its share of the blocks
shard.py       which part of a layer each rank of a group has
all_reduce.py  sums over the ranks
"""
