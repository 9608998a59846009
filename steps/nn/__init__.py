"""Quantized layers for torch (optional): `QuantLinear`, `quantize_model`, the custom operator."""
