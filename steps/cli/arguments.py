"""What a command line asks for: steps, formats, a shape, data, a machine."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from qformats import FILE_FORMATS, WEIGHT_FORMATS
from steps.checks.select import UsageError, select
from steps.contract import Kernel, Launch, Size, Step, Work, why_no_gpu
from steps.kernels.parts.activations.layouts import reading_of
from steps.product.choice import Choice
from steps.registry import find, ladder, lesson_of

if TYPE_CHECKING:
    from steps.driver.machines import Gpu, Simulator

MachineOf = Callable[[int], "Gpu | Simulator"]
"""Lane order -> the machine; a GPU has no order and is the same for all."""


@contextmanager
def refusing(*errors: type[Exception]) -> Iterator[None]:
    """Errors of these kinds refuse the request: UsageError with their text."""
    try:
        yield
    except errors as error:
        raise UsageError(str(error)) from None


def machines(asked: str) -> tuple[str, MachineOf, str | None]:
    """(name, lane order -> machine, why it is not a GPU) for "gpu", "simulator" or "auto".

    UsageError where a GPU is asked for and there is none, or where the simulator cannot run.
    """
    from steps.driver.machines import Gpu, Simulator

    reason = why_no_gpu() if asked != "simulator" else None
    if asked == "gpu" and reason:
        raise UsageError(f"no CUDA GPU can be used here: {reason}")
    if asked == "gpu" or (asked == "auto" and reason is None):
        gpu = Gpu()
        return gpu.name, lambda _: gpu, None
    try:
        import greenlet  # noqa: F401
    except ImportError:
        raise UsageError(
            "the simulator needs the package greenlet: pip install greenlet, or run `make doctor`"
        ) from None
    return "simulator", Simulator, reason or "none was asked for"


def steps_of(texts: Sequence[str]) -> tuple[Step, ...]:
    """Steps by number ("4", "04", "step4", "2 3"); all for "all" or nothing.

    UsageError for one that does not exist.
    """
    asked = [text for several in texts for text in several.split()]
    if not asked or "all" in asked:
        return ladder()
    found = {}
    for text in asked:
        number = text.lower().removeprefix("step")
        if not number.isascii() or not number.isdigit():
            raise UsageError(f"{text!r} is not a step: give a number, such as 4, or all")
        with refusing(ValueError):
            step = find(int(number))
        found[step.number] = step
    return tuple(found[number] for number in sorted(found))


def one_step(texts: Sequence[str]) -> Step:
    """The only step named; UsageError for several."""
    found = steps_of(texts)
    if len(found) != 1:
        raise UsageError("name one STEP, such as 4")
    return found[0]


def formats_of(texts: Sequence[str]) -> tuple[str, ...]:
    """Format names, separated by commas or blanks; for "all" or nothing those of every step."""
    asked = [name for text in texts for name in text.lower().replace(",", " ").split()]
    known = (*WEIGHT_FORMATS, *FILE_FORMATS)
    for name in asked:
        if name not in (*known, "all"):
            raise UsageError(
                f"unknown format {name!r}: use {', '.join(known)}, or all for the first "
                f"{len(WEIGHT_FORMATS)}"
            )
    if not asked or "all" in asked:
        return WEIGHT_FORMATS
    return tuple(name for name in known if name in asked)


def is_shape_asked(args: Namespace) -> bool:
    """Whether any of --m, --n, --k is given."""
    return not (args.m is args.n is args.k is None)


def shape_of(args: Namespace, default: Size) -> Size:
    """The shape of --m --n --k; `default` fills in what they leave open."""
    require_blocks(k := args.k or default[2])
    return args.m or default[0], args.n or default[1], k


def require_blocks(k: int) -> None:
    """UsageError where K is not a multiple of the smallest block."""
    if k % 32:
        raise UsageError(f"K={k} is not a multiple of the block of 32: use {k // 32 * 32 + 32}")


def home_shapes_of(args: Namespace, step: Kernel) -> tuple[Size, ...]:
    """The step's home shapes, in which --m --n --k replace what they name."""
    return tuple(dict.fromkeys(shape_of(args, home) for home in lesson_of(step).home_shapes))


def work_of(args: Namespace, step: Step) -> Work:
    """The first work of a step that --format, --scheme and --dtype allow.

    By default it is of the first format, in the family that continues the ladder.
    """
    family = args.scheme or step.families[-1]
    return select((step,), formats_of(args.format), family, output=args.dtype)[0]


def launches_of(work: Work, shape: Size, dtype: str | None) -> tuple[Launch, ...]:
    """Those of a product that writes C in a dtype, None for the step's own; A comes so where the
    step reads it."""
    source = reading_of(work.step, work.output(dtype), work.family).source
    return Choice.of_work(work, shape, source, dtype).launches()


def require_compilable(arch: str) -> None:
    """UsageError for an architecture that the compiler has not."""
    from numba.cuda.cudadrv import nvrtc

    from steps.compile.compiler import OLDEST, architecture

    known = [architecture(cc) for cc in nvrtc.get_supported_ccs() if cc >= OLDEST]
    if arch not in known and f"{arch}a" not in known:
        raise UsageError(f"the compiler has no architecture {arch!r}: it has {', '.join(known)}")
