"""Programmatic dependent launch: a kernel that begins while the one before it still runs.

PTX ISA 9.7.13.13, griddepcontrol. With `Launch.overlap` a kernel's blocks may become resident as
soon as every block of the kernel before it in the stream has called `let_next_start` (or ended),
and there is room for them. What that kernel writes can only be read after `wait_for_previous`,
which returns when all of it is done and visible. Everything else, such as loads of weights, may
come before.

Without `Launch.overlap` both do nothing. GPUs before compute capability 9.0 do not have them, and
no code is made there; nor is there anything to do in the simulator, where a launch begins when the
one before it has ended.
"""

from steps.instructions.define import ptx


@ptx("griddepcontrol.wait;", scope="lane", memory=True, min_cc=(9, 0), optional=True)
def wait_for_previous(lane):
    """Wait until the launches before this one have ended, their writes visible. ACQBULK."""


@ptx("griddepcontrol.launch_dependents;", scope="lane", memory=True, min_cc=(9, 0), optional=True)
def let_next_start(lane):
    """Allow the next launch of the stream to begin, once all blocks have said so. PREEXIT."""
