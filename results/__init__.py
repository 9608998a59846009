"""What was measured: one regime, one run per GPU, charts and tables made from it alone.

    measure/     how kernels, calls and models are timed
    baselines/   the same products by others, recorded once: JSON files
    record/      result files as data, and their provenance
    render/      run -> charts, tables, page
    worklog/     what was learned; a page a step
    <gpu>/       the files of a GPU, such as nvidia-h200/run.json

`python -m results` prints rows of a run. Importing this package needs neither torch nor matplotlib
nor a GPU.
"""
