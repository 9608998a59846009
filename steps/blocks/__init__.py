"""How a block's bytes become numbers on the GPU, and the pass that quantizes A to Q8_1."""
