"""What a learner runs.

exercises/    steps with holes to fill in, and a check that says what is wrong with the filling
pitfalls/     the museum of known bugs
trace/        what a warp does to memory, recorded and drawn
"""
