"""Programmatic dependent launch: a kernel that begins while the one before it still runs.

PTX ISA 9.7.13.13, griddepcontrol. With `Launch.overlap` a kernel's blocks may become resident once
every block of the kernel before it in the stream has called `griddepcontrol_launch_dependents` or
ended, and there is room for them. What that kernel writes may be read only after
`griddepcontrol_wait`, which returns when all of it is done and visible. Everything else, such as
loads of weights, may come before.

Without `Launch.overlap` both instructions do nothing. GPUs before compute capability 9.0 lack them,
and no code is generated there.

In the simulator a launch begins when the one before it has ended, but what that one stored may not
be read before the wait, and what it used may not be overwritten: see `steps.simulator.stream`.
"""

from steps.instructions.define import ptx


@ptx("griddepcontrol.wait;", scope="lane", memory=True, min_cc=(9, 0), optional=True)
def griddepcontrol_wait(lane):
    """Wait until the launches before this one have ended and their writes are visible. ACQBULK."""
    lane.block.order.waited_for_launches(lane)


@ptx("griddepcontrol.launch_dependents;", scope="lane", memory=True, min_cc=(9, 0), optional=True)
def griddepcontrol_launch_dependents(lane):
    """Allow the next launch of the stream to begin once all blocks have called this. PREEXIT."""
