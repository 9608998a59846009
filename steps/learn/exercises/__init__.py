"""Exercises: a step with holes to fill in, and a check that says what is wrong with the filling.

    make exercise STEP=3                                      # the step, its kernel full of holes
    make check FILE=build/exercises/step03_shared_tiled.py    # right, or what is wrong and where

Markers in a step's file (`# hole 2` ... `# end of hole 2`) say where the holes are, `stepNN.toml`
beside this file what each asks for. So an exercise is made from the step as it is. `text` makes and
reads exercises, `load` imports one, `trial` runs it on a problem, `suspects` computes what known
bugs give, `probe` and `places` multiply operands that show which element, row, K and scale is taken
for which, `witness` names both sides of a race, `diagnose` puts a failed trial into words, `check`
does all of it in order.
"""
