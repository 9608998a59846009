"""What a warp does to memory: a step's launch recorded in the simulator, and its requests drawn.

`traced` records, `picture` draws one memory instruction as SVG. The command `make trace` and the
page of `make site` show them.
"""
