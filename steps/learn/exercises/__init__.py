"""Exercises: a step with holes to fill in, and a check that says what is wrong with the filling.

    make exercise STEP=3                                      # the step, its kernel full of holes
    make check FILE=build/exercises/step03_shared_tiled.py    # right, or what is wrong and where

Markers in the file of a step's kernel (`# hole 2` ... `# end of hole 2`) say where the holes are,
`stepNN.toml` beside this file what each asks for. So an exercise is made from the step as it is.

    text      makes and reads exercises            load       imports one
    trial     runs it on a problem                 check      does all of it in order
    diagnose  puts a failed trial into words, with what these find:
      faults    errors of the simulator            races      both sides of a race
      suspects  what known bugs compute            unwritten  the load that makes a NaN
      probe     which weight meets which activation of a block
      places    from which row, K and scale each operand is taken
      contents  shared memory beside that of the step's own kernel
      rerun     the launch once more, told of each access to memory
      wording   lists and ranges in sentences
    advice    what a right kernel could do better
    progress  how far the exercises are
"""
