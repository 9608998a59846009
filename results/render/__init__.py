"""From a run to charts, tables and pages: nothing is shown that is not in a run.

query.py       what is asked of a run, and how numbers are written
charts/        run -> SVG
captions.py    the charts in words
readme.py      the tables of README.md
complete.py    results/RESULTS.md
tables.py      writes both, and checks all that is generated
page.py        one HTML page: ladder, steps, museum    (markup.py, compiled.py)
text.py        tables and progress on a terminal
"""
