"""What was measured: one regime, one run per GPU, charts and tables made from it alone.

    record/      a run as data: schema, file, environment, provenance
    measure/     how kernels are timed; bench and tuning
    baselines/   the same products by others: cuBLAS, llama.cpp, recorded figures
    render/      run -> charts, tables, page
    worklog/     one page a step
    decoder/     a llama of a GGUF file    (python -m steps.decoder)

Importing this package needs neither torch nor matplotlib nor a GPU.
"""
