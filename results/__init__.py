"""What was measured: one timing protocol, one JSON per run, charts and tables made from it alone.

    limits.py     what this GPU can do at most, measured
    measure.py    the one timing protocol
    record.py     a run as data: environment and rows, read, validated, written atomically
    peers.py      the same work by others: cuBLAS through torch, llama.cpp measured or as given
    llama_cpp.py  the ggml of llama-cpp-python, by ctypes
    charts.py     run -> SVG            (python -m results.render.charts)
    decoder/      a llama of a GGUF file    (python -m results.decoder)
    report.py     run -> the tables between the README's markers

Importing this package needs neither torch nor matplotlib nor a GPU.
"""
