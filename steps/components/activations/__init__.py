"""Activation passes: A rounded to float16, or quantized to Q8_1 or int8, in the steps' layouts."""
