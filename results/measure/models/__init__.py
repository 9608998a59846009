"""How fast a decoder is, beside float16 torch.matmul in the same decoder.

one_gpu.py        tokens a second, whole
several_gpus.py   the same on several GPUs that share the model
"""
