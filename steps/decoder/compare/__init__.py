"""How right a decoder is.

checks.py          against torch on the dequantized weights
quality.py         perplexity of a text, and the distance from float32
emulation.py       products by torch on a CPU that round as the steps state it
stated_errors.py   what products state that they are off by, and what that does to logits
"""
