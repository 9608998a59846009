"""From a run to charts, tables and pages: nothing is shown that is not in a run.

query.py       what is asked of a run, and how numbers are written
charts/        run -> SVG
captions.py    the charts in words
tables.py      the tables of README.md, and the check of all that is generated
complete.py    results/RESULTS.md
page.py        one HTML page: ladder, steps, museum    (markup.py, lesson.py, compiled.py)
text.py        tables and progress on a terminal
"""
