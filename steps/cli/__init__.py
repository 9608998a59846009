"""The command line, `python -m steps ...`: one file per group of commands. Nothing imports it.

main.py             the parser, and which file has a command
arguments.py        what a command line asks for: steps, formats, a shape, data, a machine
run.py              run, ladder, check
report.py           what these print
listing.py          list, diff, ptx, sass
exercises.py        exercise, exercises, and check of a file of one's own
fuzz.py             fuzz
pitfalls.py         pitfalls
trace.py            trace
bench.py            bench
tune.py             tune
tools.py            profile, sanitize: NVIDIA's tools on a step
counters.py         counters, by Nsight Compute, and launch
gpu_tests.py        gpu-tests: is everything right on this GPU?
doctor.py           what runs on this machine, and what is missing
warm.py             warm, cache: kernels compiled before they are needed, and kept
gguf_weights.py     --gguf and --tensor: weights of a file
language_model.py   chat, decoder, quality: a whole model
"""
