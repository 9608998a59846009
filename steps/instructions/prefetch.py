"""A line of global memory that is loaded into the L2 before anything asks for it."""

from steps.instructions.define import GLOBAL, ptx


@ptx("prefetch.global.L2 [$0];", takes=(GLOBAL,), scope="lane", memory=True)
def prefetch_line(lane, array, index):
    """Begin to load the 128 bytes around array[index] into the L2. Stores arrive there too, so it
    may be asked for before griddepcontrol.wait. CCTL.E.PF2."""
    array.hint(index, array.itemsize)
