"""Exercises: a step with holes to fill in, and a check that says what is wrong with the filling.

    make exercise STEP=3                                      # the step, its kernel full of holes
    make check FILE=build/exercises/step03_shared_tiled.py    # right, or what is wrong and where

The holes are the phases of the step's kernel, which comments name (`# --- multiply`). So an
exercise is made from the step as it is.

    text      makes and reads exercises            load       imports one
    trial     runs it on a problem                 check      does all of it in order
    restrictions  what no kernel may have of Python
    diagnose  puts a failed trial into words, with what these find:
      faults    errors of the simulator            races      both sides of a race
      suspects  what known bugs compute            beside     loads beside those of the step
      rerun     the launch once more, told of each access to memory
    advice    what a right kernel could do better
    progress  how far the exercises are
"""
