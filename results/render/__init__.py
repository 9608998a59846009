"""From a run to charts, tables and pages: nothing is shown that is not in a run.

query.py           what is asked of a run
rows.py            its records by columns, for tables and for CSV files
staleness.py       which records are no facts about the code of this tree
table.py           a table as text and as Markdown
charts/            run -> SVG
readme.py          the tables of README.md
complete.py        results/RESULTS.md
models.py          tables of whole models
generated.py       writes all of these, and checks that they are of the current runs
page.py            one HTML page: ladder, charts, steps
markup.py          docstrings, worklog and source as HTML
machine_code.py    a step's machine code in figures, and its source beside it
"""
