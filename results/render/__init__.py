"""From a run to charts, tables and pages: nothing is shown that is not in a run.

table.py         a table: columns and lines; as text, as Markdown (as HTML: page.html.jinja)
rows.py          the columns of rows, calls and baselines; CSV files; `python -m results M=8`
query.py         what is asked of a run
readme.py        the tables of README.md
complete.py      results/RESULTS.md    (models.py: its tables of whole models)
generated.py     writes all of these, and checks them
charts/          run -> SVG    (captions.py: the charts in words)
page.py          one HTML page: ladder, steps, museum    (markup.py, machine_code.py, roof.py)
"""
