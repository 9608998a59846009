"""A llama or Qwen of a GGUF file, every matrix product through this project, the rest from torch.

    operations.py  what lies between products: norms, rotary embedding, attention, SwiGLU
    model.py       products, layers, the cache of keys and values, greedy generation in CUDA graphs
    rotary.py      frequencies of the rotary embedding, scaled as files say
    files.py       configuration and weights of a GGUF file; a tiny random one to write
    vocabulary.py  texts to tokens and back
    stream.py      tokens one by one: the likeliest, or drawn ones
    chat.py        a conversation in a terminal, by the file's chat template
    parallel.py    a model on several GPUs, a process for each: who has what, and who says what
    emulation.py   products by torch that round as the steps state it, for a CPU
    checks.py      comparisons with torch on the dequantized weights, and with llama.cpp
    quality.py     perplexity, and the distance from float32; alice.txt, a text for it
    bench.py       tokens a second with the shapes of Llama 3 8B, beside float16 torch.matmul
    bench_parallel.py  the same of several GPUs beside one, with the shapes of 70B too
    __main__.py    the command line: python -m results.decoder

All of it but `files`, `rotary` and `vocabulary` needs torch, an extra of this project.
"""
