"""Activation passes: A rounded to float16, quantized to Q8_1 or to int8, in the layouts steps read."""
