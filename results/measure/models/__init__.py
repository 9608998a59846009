"""How fast a decoder is: whole, its operations between products, and on several GPUs."""
