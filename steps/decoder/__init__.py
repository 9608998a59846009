"""A llama or Qwen of a GGUF file, also one with experts: products, and what lies between them, by
this project's kernels.

torch makes them instead as a reference, and where no kernel can.

    keys.py                what a file says of its model: types and ranges
    files.py               configuration and weights of a file; a tiny random one to write
    model.py               products, layers, the cache of keys and values, CUDA graphs of generation
    rotary.py              frequencies of the rotary embedding, scaled as files say
    operations.py          what lies between products, by torch: norms, attention, SwiGLU
    kernel_operations.py   the same by the kernels of `steps.kernels.between`: the default on a GPU
    deferred.py            norms of few tokens, made by the products around them
    chained.py             layers of one token, a launch from one attention to the next
    expert_layers.py       layers with experts at one token: attention and one launch behind it
    parallel.py            a model on several GPUs, a process for each
    text/                  tokens of a vocabulary, answers as they are generated, conversations
    compare/               checks against torch; perplexity and distance from float32

`python -m steps chat`, `decoder` and `quality` run it. All but `files`, `rotary` and
`text.vocabulary` need torch.
"""
