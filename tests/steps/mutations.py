"""Mutations: each synchronizing call, left out or made wrong, must be noticed on a CPU.

A right kernel passes its checks; that says little about the checks. So every call that orders
something (a barrier, a fence, an arrival, a wait) is taken out of the source once, and the step is
checked as it is then: the simulator must stop it, or its result be wrong. Other mutations are
finer: another stage, the other parity, an mbarrier that takes another number of arrivals.

    mutations = own_sites("step14")         of a lesson and of what none before it needs, or of an
    mutations = own_sites("kernel14")       engineered kernel that has a lesson of its own
    outcome = tried(mutation, "step14")     what noticed it

The source is changed as a syntax tree, and the step imported once more from it, with the modules
that import what was changed. The cases are those in which the step's tests run (small shapes, and
the work of few SMs in `tests.steps.test_steps_simulator`), the quick ones first, and of these only
those that reach the call.

    .venv/bin/python -m tests.steps.mutations              writes results/worklog/mutations.md
    .venv/bin/python -m tests.steps.mutations step13 kernel13       tries these alone
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import inspect
import itertools
import math
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

import numpy as np
import pytest
from numba.cuda.dispatcher import CUDADispatcher

import steps
from reference import Problem, check
from steps.blocks.chained import multiplies_twice
from steps.checks.cases import routing
from steps.checks.run import drawn
from steps.checks.verify import Prepared, operands, prepare, result
from steps.contract import Family, Kernel, Size, Step
from steps.driver.machines import Simulator
from steps.simulator.errors import (
    BarrierDivergence,
    Deadlock,
    Misaligned,
    OutOfRange,
    Race,
    SimulatorError,
)
from tests.steps.works import ENGINEERED, input_of, label_of

SUBJECTS: Final[Mapping[str, Kernel]] = {
    label_of(one): one for one in sorted((*steps.ladder(), *ENGINEERED), key=lambda one: one.number)
}
"""What is mutated: lessons, and behind each the engineered kernel that has it as a lesson."""


def home_of(kernel: Kernel) -> str:
    """The module that defines it: a lesson's file, or that of an engineered kernel."""
    return f"steps.{kernel.name}" if isinstance(kernel, Step) else kernel.launch.__module__


def kernel_in(module: ModuleType) -> Kernel:
    found: Kernel = getattr(module, "STEP", None) or module.KERNEL
    return found


ROOT: Final = Path(steps.__file__).parent.parent
TABLE: Final = ROOT / "results" / "worklog" / "mutations.md"

# --- calls that synchronize -----------------------------------------------------------------------

BARRIERS: Final = ("syncthreads", "syncwarp", "threadfence")
"""Of `cuda`."""

INSTRUCTIONS: Final = (
    "barrier_sync",
    "barrier_arrive",
    "mbarrier_init",
    "mbarrier_arrive",
    "mbarrier_arrive_expect",
    "mbarrier_wait",
    "fence",
    "fence_mbarrier_init",
    "fence_proxy_async",
    "cp_async_commit",
    "griddepcontrol_wait",
    "wgmma_fence",
    "wgmma_commit",
)

FACTORIES: Final = ("cp_async_wait", "wgmma_wait", "setmaxnreg_inc", "setmaxnreg_dec")
"""What they return synchronizes."""

WAITS: Final = ("cp_async_wait", "wgmma_wait")
"""Factories that take a number of groups, the newest, which are not waited for."""

LATER: Final = "one group later"

STAGE: Final = re.compile(r"stage|previous|stage_at|previous_at|s|slot|base")
"""Names of a stage: its number, or the first of its bytes."""

STAGE_NUMBER: Final = re.compile(r"stage|s|step")
"""Its number alone, that of a step of K among the first stages, too."""

STAGE_SIZE: Final = re.compile(r"stage_bytes|slot_bytes|[aw]_bytes")
PARITY: Final = re.compile(r"parity")
BARRIER_OF_STAGE: Final = "full"  # a field of Ring: where the barrier is that copies report to


Key = tuple[str, str, str, int, str]
Place = tuple[int, int]
"""Line and column."""


@dataclass(frozen=True)
class Site:
    """A place in the source where something can be mutated."""

    path: Path
    function: str
    line: int
    column: int
    text: str
    called: str  # the instruction, or the function that consists of them
    kind: str  # "left out", "other stage", "same stage", "other parity", LATER, ...
    turn: int = 1  # 2 for the second one with this text in its function, and so on

    @property
    def module(self) -> str:
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts)

    @property
    def place(self) -> Place:
        return self.line, self.column

    @property
    def key(self) -> Key:
        """What names it in a list: it does not change with lines above."""
        return self.path.stem, self.function, self.text, self.turn, self.kind

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line} {self.function}: {self.text}, {self.kind}"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def is_device_code(function: ast.AST) -> bool:
    """A function decorated with @cuda.jit."""
    return isinstance(function, ast.FunctionDef) and any(
        ast.unparse(decorator).startswith("cuda.jit") for decorator in function.decorator_list
    )


def device_functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and is_device_code(node):
            yield node


def aliases(tree: ast.AST) -> dict[str, str]:
    """Local name -> the factory, instruction or field that it was assigned from."""
    found = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
                        found[name.id] = value.func.id
                    elif isinstance(value, ast.Attribute):
                        found[name.id] = value.attr
    return found


def called_name(call: ast.Call, known: dict[str, str]) -> str | None:
    """The instruction that a call is of, where it synchronizes."""
    function = call.func
    if isinstance(function, ast.Attribute):
        is_cuda = isinstance(function.value, ast.Name) and function.value.id == "cuda"
        return function.attr if is_cuda and function.attr.startswith(BARRIERS) else None
    if not isinstance(function, ast.Name):
        return None
    if function.id in INSTRUCTIONS:
        return function.id
    of = known.get(function.id)
    return of if of in FACTORIES or of in wrappers() else None


@cache
def wrappers() -> frozenset[str]:
    """Names of device functions in kernels that do nothing but synchronize: of fields such as
    `Ring.release`, too."""
    found = set()
    for path in (ROOT / "steps" / "kernels").rglob("*.py"):
        tree = tree_of(path)
        known = {n: f for n, f in aliases(tree).items() if f in FACTORIES}
        for function in device_functions(tree):
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Expr)]
            body = [node.value for node in calls if not isinstance(node.value, ast.Constant)]
            others = (ast.Assign, ast.AugAssign, ast.Return, ast.While)
            if (
                body
                and not any(isinstance(node, others) for node in ast.walk(function))
                and all(isinstance(each, ast.Call) and _instruction(each, known) for each in body)
            ):
                found.add(function.name)
    return frozenset(found)


def _instruction(call: ast.Call, known: dict[str, str]) -> bool:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr.startswith(BARRIERS)
    return isinstance(function, ast.Name) and (function.id in INSTRUCTIONS or function.id in known)


@cache
def sites(path: Path) -> tuple[Site, ...]:
    """Every mutation of a file."""
    return sites_in(tree_of(path), path)


def sites_in(tree: ast.Module, path: Path) -> tuple[Site, ...]:
    known = aliases(tree)
    found: dict[tuple[int, int, str], Site] = {}
    hosts = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    for function in (*device_functions(tree), *hosts):
        on_gpu = is_device_code(function)
        for node in ast.walk(function):
            if not on_gpu and not is_wait(node):
                continue
            for called, kind, _ in changes(node, known):
                place: Place = node.lineno, node.col_offset  # type: ignore[attr-defined]
                site = Site(path, function.name, *place, ast.unparse(node), called, kind)
                if on_gpu or kind == LATER:
                    found.setdefault((*place, kind), site)
    seen: Counter[tuple[str, str, str]] = Counter()
    in_order = []
    for site in sorted(found.values(), key=lambda site: (site.line, site.column, site.kind)):
        seen[site.function, site.text, site.kind] += 1
        in_order.append(replace(site, turn=seen[site.function, site.text, site.kind]))
    return tuple(in_order)


def is_wait(node: ast.AST) -> bool:
    """A factory's call, in which the host decides how many groups are not waited for."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in WAITS


def changes(node: ast.AST, known: dict[str, str]) -> Iterator[tuple[str, str, ast.expr]]:
    """(what is called, kind, what stands there instead) of each mutation of an expression."""
    if isinstance(node, ast.Call):
        yield from changes_of_call(node, known)
    elif isinstance(node, ast.BinOp):
        left, right = node.left, node.right
        of_stage, one = is_named(left, STAGE), ast.unparse(right) == "1"
        if isinstance(node.op, ast.BitXor) and is_named(left, PARITY) and one:
            yield "", "other parity", left
        elif isinstance(node.op, ast.Add) and of_stage and (one or is_named(right, STAGE_SIZE)):
            yield "", "same stage", left
        elif isinstance(node.op, ast.Mult):
            if is_named(left, STAGE_NUMBER) and is_named(right, STAGE_SIZE):
                yield "", "other stage", ast.BinOp(flipped(left), node.op, right)
            elif isinstance(left, ast.Constant) and is_named(right, STAGE):  # of its barrier
                yield "", "other stage", ast.BinOp(left, node.op, flipped(right))


def changes_of_call(node: ast.Call, known: dict[str, str]) -> Iterator[tuple[str, str, ast.expr]]:
    called, name = called_name(node, known), ast.unparse(node.func)

    def with_argument(i: int, value: ast.expr) -> ast.Call:
        return ast.Call(node.func, [*node.args[:i], value, *node.args[i + 1 :]], node.keywords)

    if name in WAITS:
        yield name, LATER, with_argument(0, ast.BinOp(node.args[0], ast.Add(), ast.Constant(1)))
    if called is None and name != BARRIER_OF_STAGE:
        return
    for i, argument in enumerate(node.args):
        if is_named(argument, STAGE):
            yield called or "", "other stage", with_argument(i, flipped(argument))
        elif is_named(argument, PARITY):
            yield called or "", "other parity", with_argument(i, flipped(argument))
    if called is not None:
        # of acc = wait(acc), acc remains
        yield called, "left out", node.args[0] if node.args else ast.Constant(None)
    if called == "mbarrier_init":
        for kind, operator in (("one arrival more", ast.Add()), ("one arrival less", ast.Sub())):
            if kind == "one arrival more" or not isinstance(node.args[-1], ast.Constant):
                count = ast.BinOp(node.args[-1], operator, ast.Constant(1))
                yield called, kind, with_argument(len(node.args) - 1, count)


def is_named(node: ast.AST, pattern: re.Pattern[str]) -> bool:
    return isinstance(node, ast.Name) and pattern.fullmatch(node.id) is not None


def flipped(node: ast.expr) -> ast.BinOp:
    return ast.BinOp(node, ast.BitXor(), ast.Constant(1))


class Change(ast.NodeTransformer):
    """One mutation of a tree."""

    def __init__(self, site: Site, known: dict[str, str]):
        self.site, self.known, self.done = site, known, 0

    def visit(self, node: ast.AST) -> Any:
        site = self.site
        here = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
        if here == site.place and ast.unparse(node) == site.text:
            for _, kind, instead in changes(node, self.known):
                if kind == site.kind:
                    self.done += 1
                    return ast.copy_location(instead, node)
        return self.generic_visit(node)


def changed(site: Site) -> ast.Module:
    """The tree of its file with the mutation."""
    return changed_in(tree_of(site.path), site)


def changed_in(tree: ast.Module, site: Site) -> ast.Module:
    change = Change(site, aliases(tree))
    found = change.visit(copy.deepcopy(tree))
    assert change.done == 1, f"{site}: found {change.done} times"
    return ast.fix_missing_locations(found)


class Marked(ast.NodeTransformer):
    """A tree in which expressions at some places tell when they are reached: where x was stands
    (_reached(place), x)[1]."""

    def __init__(self, places: Iterable[Place]):
        self.left = set(places)

    def visit(self, node: ast.AST) -> Any:
        place = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
        if not isinstance(node, ast.expr) or place not in self.left:
            return self.generic_visit(node)
        self.left.remove(place)  # what is inside may begin at the same place
        marked = ast.parse(f"(_reached({place}), 0)[1]", mode="eval").body
        marked.value.elts[1] = self.generic_visit(node)  # type: ignore[attr-defined]
        return ast.copy_location(marked, node)


# --- a step with one file changed -----------------------------------------------------------------


@cache
def path_of(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


@cache
def imports(path: Path) -> frozenset[str]:
    """Modules of steps that a file imports."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("steps"):
            found.add(node.module)
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return frozenset(name for name in found if path_of(name).is_file())


SHARED: Final = ("steps.kernels", "steps.blocks")
"""Rooms of device code that steps are made of."""


@cache
def needed(module: str) -> frozenset[str]:
    """The module, the device code and the steps that it imports, and that these import."""
    found: set[str] = set()
    rest = [module]
    while rest:
        name = rest.pop()
        if name in found or not path_of(name).is_file():
            continue
        if name.startswith((*SHARED, "steps.step")):
            found.add(name)
            rest += imports(path_of(name))
    return frozenset(found)


class _Finder(MetaPathFinder):
    """Imports some modules from other trees than their files'."""

    def __init__(self, trees: Mapping[str, ast.Module]):
        self.trees = trees

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.trees:
            return None
        location, tree = str(path_of(name)), self.trees[name]

        class Loader(SourceFileLoader):
            def get_code(self, fullname: str) -> Any:
                return compile(tree, location, "exec")

        return importlib.util.spec_from_file_location(name, location, loader=Loader(name, location))


@contextmanager
def imported(module: str, trees: Mapping[str, ast.Module]) -> Iterator[Mapping[str, ModuleType]]:
    """A module and those that it needs, by name, those imported anew that a change concerns."""
    anew = {name for name in needed(module) if name == module or not needed(name).isdisjoint(trees)}
    packages = [name for name in sys.modules if name.startswith(SHARED)]
    kept = {name: sys.modules[name] for name in (*packages, *needed(module)) if name in sys.modules}
    finder = _Finder(trees)
    sys.meta_path.insert(0, finder)
    try:
        for name in anew & kept.keys():
            parent, _, child = name.rpartition(".")
            delattr(sys.modules[parent], child)
            del sys.modules[name]
        importlib.import_module(module)
        yield {name: sys.modules[name] for name in needed(module)}
    finally:
        sys.meta_path.remove(finder)
        for name, old in kept.items():
            sys.modules[name] = old
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, old)


# --- cases ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Case:
    """What a step is checked on: with so many SMs, and other constants, in these modules."""

    shape: Size
    format: str
    family: Family
    output: str = "float32"
    sms: int | None = None
    modules: tuple[str, ...] = ()
    constants: tuple[tuple[str, Any], ...] = ()
    input: str = ""  # dtype of A; "": the step's own

    def __str__(self) -> str:
        others = "".join(f", {name} = {shown(value)}" for name, value in self.constants)
        to = "" if self.output == "float32" else f" to {self.output}"
        few = "" if self.sms is None else f", {self.sms} SM{'s' * (self.sms > 1)}"
        return f"{'x'.join(map(str, self.shape))} {self.format}{to}{few}{others}"


def shown(value: Any) -> str:
    """A constant, or what a function of any operands gives in its place."""
    if not callable(value):
        return str(value)
    count = len(inspect.signature(value).parameters)
    return str(value(*[None] * count))


SHAPES: Final = ((1, 16, 32), (3, 35, 96), (1, 33, 160), (9, 37, 96), (17, 20, 416))
FORMATS: Final = ("q5_0", "q4_1", "q8_0", "q4_0", "q5_1")
MINIMA: Final = "q4_1"  # whose kernels copy and synchronize what others do, and minima besides

RING: Final = (1, 16, 1440)
"""12 steps of 128 K: a ring of two stages is used six times, and more than one consumer has time to
be left behind."""

SMALL: Final = math.prod(RING)
"""A larger case takes about as long as compiling a kernel."""

LARGE: Final = 500_000
"""A larger one takes seconds, and reaches no place that others do not."""


def _two_tiles(*_: Any) -> Any:
    return (128, 16), 2, 1, 0


PERSISTENT: Final = tuple(
    (1, (1, 140, k), output, {"tiling": _two_tiles, **ring})
    for k, ring in ((160, {}), (416, {"STAGES": 2}))
    for output in ("float32", "float16")
)
"""A block has two tiles, one after the other. Of 2 steps of K: its ring is not used again, so that
nothing but barriers keeps the end of one tile and that of the next apart. And of 4 steps."""

TWO_TILES: Final = ((1, 140, 160), (1, 140, 1440))
"""The same of lessons, which make such tiles by themselves; 24 steps use a ring of 8 thrice."""

LONG_RING: Final = ((1, 16, 2304),)
"""18 steps, of one tile."""

DECODE: Final = (
    (1, (3, 90, 416), "float32", {"WARPS": (4,), "SUMS": 4000}),  # two of the four along N
    (1, (7, 10, 1056), "float32", {"WARPS": (2,), "shared_memory": lambda: 28_000}),
)
"""Few warps, that take little time: A kept and shared by warps along N, and tiles of A in slots."""

MORE_WORK: Final[dict[str, tuple[tuple[int, Size, str, dict[str, Any]], ...]]] = {
    # a tile and a part of the next one, with a ring of two stages
    "kernel10": ((1, (3, 896, 160), "float32", {"STAGES": 2}),),
    "step10": ((1, (3, 896, 160), "float32", {"shared_memory": lambda: 60_000}),),
    **dict.fromkeys(("kernel14", "kernel15"), PERSISTENT),
    "kernel17": DECODE,
    # of one token A is kept, of more it comes in boxes
    "kernel18": (*DECODE, (1, (1, 90, 416), "float32", {"WARPS": (4,), "SUMS": 1000})),
    # warps of more tiles of K than their rings have slots
    **dict.fromkeys(("step17", "step18"), ((1, (3, 20, 4256), "float16", {}),)),
    "step22": tuple((1, shape, "float16", {}) for shape in ((1, 300, 160), (1, 300, 1440))),
    "step20": tuple((1, shape, "float16", {}) for shape in (*TWO_TILES, (20, 140, 416))),
    "step19": ((1, (3, 20, 2208), "float16", {}), (1, (44, 20, 96), "float16", {})),
    # a ring that is used twice, by two blocks of few warps
    "step21": ((2, (2, 140, 288), "float16", {"CONSUMERS": 4, "PRODUCERS": 2, "THREADS": 192}),),
}
"""Cases that no other test has: (SMs, shape, dtype of C, constants)."""


BESIDE: Final = Case(
    (33, 20, 160),
    MINIMA,
    "A16",
    sms=2,
    modules=(
        "steps.kernels.prefill.wgmma_float16",
        "steps.kernels.parts.activations.layouts",
        "steps.kernels.parts.activations.beside",
    ),
    constants=(("tiling", lambda *_: ((128, 16), 3, 2, 1)), ("H200_FIRST_ROWS", 16)),
    input="bfloat16",
)
"""Of 33 rows 17 are rounded beside the tiles, one of which two blocks share."""


@cache
def cases_of(label: str) -> tuple[Case, ...]:
    """Small shapes, all dtypes of C, a ring of two stages, work shared by few SMs: the small ones
    first."""
    from tests.steps.test_steps_simulator import all_shared_work, heuristics_in

    step = SUBJECTS[label]
    modules = step.launch.__module__, heuristics_in(step).__name__
    twice, found = multiplies_twice(step), []
    minima = MINIMA if MINIMA in step.formats else step.formats[0]
    shapes = tuple((min(m, 2), n, min(k, 160)) for m, n, k in SHAPES) if twice else SHAPES
    for family in step.families:
        found += [
            Case(shape, name, family, step.outputs[i % len(step.outputs)])
            for i, (shape, name) in enumerate(zip(shapes, FORMATS, strict=True))
            if name in step.formats
        ]
        found += [Case((9, 36, 96), minima, family, output=dtype) for dtype in step.outputs[1:]]
    work = [
        (sms, shape, step.outputs[0], constants)
        for one, sms, shape, constants in all_shared_work()
        if one.launch is step.launch and math.prod(shape) < LARGE
    ]
    work += MORE_WORK.get(label, ())
    # a lesson, whose ring has as many stages as there is room for
    if step.outputs == ("float16",) and not twice:
        work += [(1, shape, "float16", {}) for shape in (TWO_TILES if step.scratch else LONG_RING)]
    if any(hasattr(sys.modules[name], "STAGES") for name in modules):
        work.append((1, RING, step.outputs[0], {"STAGES": 2}))
    if label == "kernel14":
        found.append(BESIDE)
    for sms, shape, output, constants in work:
        given, family = tuple(constants.items()), step.families[-1]
        found.append(Case(shape, minima, family, output, sms, modules, given))
    return tuple(sorted(found, key=lambda case: math.prod(case.shape)))


@contextmanager
def as_in(case: Case, modules: Mapping[str, ModuleType] = sys.modules) -> Iterator[None]:
    """The constants of a case in the modules."""
    with pytest.MonkeyPatch.context() as patch:
        places = [modules.get(name, sys.modules[name]) for name in dict.fromkeys(case.modules)]
        for place in places:
            if hasattr(place, "multiprocessors"):
                patch.setattr(place, "multiprocessors", lambda: case.sms)
        for name, value in case.constants:
            found = [place for place in places if hasattr(place, name)]
            assert found, f"{name} is in none of {case.modules}"
            for place in found:
                patch.setattr(place, name, value)
        yield


STARTS_THE_NEXT: Final = "griddepcontrol_launch_dependents"
"""What a kernel calls that may overlap with the next one, and so with the one before, too."""


class Wrong(Exception):
    """The result is wrong."""


def prepared_for(step: Kernel, label: str, case: Case, machine: Simulator) -> Prepared:
    """The operands and launches of a kernel, which is that of `label` or a mutant of it."""
    problem = problem_of(step, case, case.input or input_of(step, case.family))
    one, given = replace(step, pack=lambda _: packed(label, case)), (problem.tokens, problem.blocks)
    others = {"dtype": case.output, "ids": problem.ids}
    return prepare(one, case.family, case.format, *given, machine, **others)


def run(step: Kernel, label: str, case: Case, order: int, rounds: int = 1) -> None:
    """Checks a step on a case; raises what is found. `rounds` products are launched in a row, each
    launch overlapping with the one before where its kernel is made for that."""
    machine = Simulator(order)
    prepared = prepared_for(step, label, case, machine)
    passes = [
        replace(launch, overlap=STARTS_THE_NEXT in launch.kernel.py_func.__code__.co_names)
        for launch in prepared.activations.launches
    ]
    machine.follow(prepared.a if prepared.ids is None else prepared.ids)
    for _ in range(rounds):
        for launch in (*passes, prepared.launch):
            machine.run(launch)
    problem = problem_of(step, case, case.input or input_of(step, case.family))
    given = operands(prepared, machine)
    found = check(result(prepared, machine), problem, case.family, given)
    if not found.ok:
        raise Wrong(found.verdict)


def problem_of(step: Kernel, case: Case, input: str) -> Problem:
    routed, pruned = routing(step, case.shape), step.accuracy == "pruned"
    return drawn(case.format, case.shape, "normal", 11, input, routed, pruned)


@cache
def packed(label: str, case: Case) -> tuple[np.ndarray, ...]:
    step = SUBJECTS[label]
    return step.pack(problem_of(step, case, "float32").blocks)


# --- which cases reach a site ---------------------------------------------------------------------


class Reach:
    """Which places the cases of a step reach. They are tried in turn, when somebody asks, and each
    must be right."""

    def __init__(self, label: str) -> None:
        self.label, self.cases = label, cases_of(label)
        self._places: list[dict[str, set[Place]]] = []  # of each case, by module

    def cases_at(self, site: Site) -> Iterator[tuple[int, Case]]:
        """Those that reach a site, with their index."""
        for i, case in enumerate(self.cases):
            if i == len(self._places):
                self._places.append(self._try(case))
            if site.place in self._places[i].get(site.module, ()):
                yield i, case

    def _try(self, case: Case) -> dict[str, set[Place]]:
        home = home_of(SUBJECTS[self.label])
        trees, found = marked(home), defaultdict[str, set[Place]](set)
        with imported(home, trees) as modules, as_in(case, modules):
            for name in trees:
                modules[name]._reached = found[name].add  # type: ignore[attr-defined]
            run(kernel_in(modules[home]), self.label, case, 0)
        return found


@cache
def marked(home: str) -> dict[str, ast.Module]:
    """The files of a lesson or kernel that have sites, each place marked."""
    found = {}
    for name in needed(home):
        if places := {site.place for site in sites(path_of(name))}:
            tree = Marked(places).visit(copy.deepcopy(tree_of(path_of(name))))
            found[name] = ast.fix_missing_locations(tree)
    return found


reach_of = cache(Reach)


# --- which sites are a step's ---------------------------------------------------------------------


@cache
def device_sites(label: str) -> tuple[Site, ...]:
    """Those of all device functions that the kernels of a step, and of its activation pass, are
    made of, whether a case reaches them or not."""
    step, lines = SUBJECTS[label], defaultdict[Path, set[int]](set)
    for case in cases_of(label):
        with as_in(case):
            prepared = prepared_for(step, label, case, Simulator())
        for launch in (*prepared.activations.launches, prepared.launch):
            for code in {one.__code__ for one in functions_of(launch.kernel.py_func)}:
                lines[Path(code.co_filename)].update(lines_of(code))
    factories = {path: factories_of(path, lines[path]) for path in lines}
    return tuple(
        site
        for name in sorted(needed(home_of(step)))
        for site in sites(path_of(name))
        if site.line in lines[site.path]
        or (site.kind == LATER and site.function in factories.get(site.path, ()))
    )


@cache
def lines_of(code: CodeType) -> range:
    """Those of a function, which factories make again and again."""
    text, first = inspect.getsourcelines(code)
    return range(first, first + len(text))


def factories_of(path: Path, lines: set[int]) -> set[str]:
    """The functions of a file that these lines are inside of."""
    return {
        each.name
        for each in tree_of(path).body
        if isinstance(each, ast.FunctionDef)
        and not lines.isdisjoint(range(each.lineno, (each.end_lineno or each.lineno) + 1))
    }


def functions_of(function: Any) -> set[Any]:
    """The device functions that one calls, and these call."""
    found, rest = set(), [function]
    while rest:
        one = rest.pop()
        if one in found:
            continue
        found.add(one)
        cells = (cell.cell_contents for cell in one.__closure__ or ())
        names = (one.__globals__.get(name) for name in one.__code__.co_names)
        rest += [value.py_func for value in (*cells, *names) if isinstance(value, CUDADispatcher)]
    return found


@cache
def own_sites(label: str) -> tuple[Site, ...]:
    """Those of a lesson's or kernel's own file, and those of what none before it is made of."""
    before: set[Site] = set()
    for one in itertools.takewhile(lambda one: one != label, SUBJECTS):
        before.update(device_sites(one))
    return tuple(site for site in device_sites(label) if site not in before)


# --- what notices a mutation ----------------------------------------------------------------------

ORDERS: Final = (0, -1, 1, 2)
"""Of lanes: each case has another."""

BROKEN: Final = re.compile(r"(NameError|TypeError|UnboundLocalError|AttributeError|SyntaxError)\b")
"""Such an error is the mutation's own: it does not count."""

WORDS: Final = {
    Race: "race",
    Deadlock: "deadlock",
    BarrierDivergence: "barrier divergence",
    OutOfRange: "out of range",
    Misaligned: "misaligned",
    Wrong: "wrong result",
}


@dataclass(frozen=True)
class Outcome:
    """`by`: what noticed a mutation of a step, None where nothing did. `on`: in which case. `said`:
    the error."""

    site: Site
    label: str
    by: str | None = None
    on: str = ""
    said: str = ""


def tried(site: Site, label: str) -> Outcome:
    """The step with the mutation on the cases that reach it, until something notices."""
    with mutant(site, label) as (step, modules):
        compiles = site.called == "wgmma_wait"
        for i, case in reach_of(label).cases_at(site):
            found = None
            with as_in(case, modules):
                if compiles and math.prod(case.shape) > SMALL:
                    compiles, found = False, noticed_in_machine_code(site, step, label, case)
                found = found or noticed(site, step, label, case, ORDERS[i % len(ORDERS)])
            if found:
                return found
    return Outcome(site, label)


@contextmanager
def mutant(site: Site, label: str) -> Iterator[tuple[Kernel, Mapping[str, ModuleType]]]:
    """(the lesson or kernel with the mutation, its modules)"""
    home = home_of(SUBJECTS[label])
    with imported(home, {site.module: changed(site)}) as modules:
        yield kernel_in(modules[home]), modules


def noticed(site: Site, step: Kernel, label: str, case: Case, order: int) -> Outcome | None:
    rounds = 2 if site.called == "griddepcontrol_wait" else 1
    try:
        run(step, label, case, order, rounds)
    except (SimulatorError, RuntimeError, Wrong) as error:
        said = str(error)
        assert not BROKEN.match(said), f"{site}: {said}"
        by = WORDS.get(type(error), "misuse" if isinstance(error, SimulatorError) else "guard band")
        return Outcome(site, label, by, f"{case}, order {order}", said)
    return None


def noticed_in_machine_code(site: Site, step: Kernel, label: str, case: Case) -> Outcome | None:
    """What the tests of machine code say of a kernel of wgmma: it may lose registers that the
    tensor cores still read, which no simulator sees."""
    from tests.steps.test_steps_machine_code import compiled, no_wgmma_loses_its_weights

    code = compiled(prepared_for(step, label, case, Simulator()).launch, "sm_90a")
    if code.warnings:
        return Outcome(site, label, "machine code", str(case), str(code.warnings))
    try:
        no_wgmma_loses_its_weights(code)
    except AssertionError:
        said = "a register is written that a running wgmma still reads"
        return Outcome(site, label, "machine code", str(case), said)
    return None


# --- what nothing notices -------------------------------------------------------------------------

COVERED: Final = (
    "the next wait covers its group before a stage is released or a sum is read; until then three "
    "groups run instead of two, in order, and ptxas gives their weights registers of their own"
)

EMPTY: Final = (
    "the newest group is empty: a ring has two stages at least, and whatever is still to be copied "
    "is issued a whole ring before the end"
)

FEWER: Final = (
    "a free slot may be filled at any time; this wait only keeps few copies under way, so that "
    "others do not queue behind them"
)

MADE: Final = (
    "all registers that its products read are written before the fence above it; this one lets "
    "ptxas make the second pair's fragments while the first pair runs, which is faster"
)

CONVERGED: Final = (
    "the wait for wgmma before it is of the whole warp, whose lanes have loaded by then; the "
    "barrier orders the loads before the arrival of one lane without counting on that"
)

MET: Final = (
    "what a consumer touches comes behind a full stage, and so behind a producer that has waited "
    "for the launch before: its writes are visible to the whole launch by then"
)

IN_ORDER: Final = (
    "atomics and stores of a thread to several counters keep their order in the simulator; on a "
    "GPU a counter might be set back too early without it"
)

EQUIVALENT: Final[dict[Key, str]] = {
    **{("beside", "leave", "fence()", i, "left out"): IN_ORDER for i in (1, 2)},
    **{
        (home, function, "cuda.syncwarp()", i, "left out"): CONVERGED
        for home, function, i in (
            ("step13_warp_specialized", "consume", 1),
            ("ring", "release", 1),
            ("step14_persistent", "consume", 1),
            ("step14_persistent", "consume", 2),
            ("step20_sorted_prefill", "consume", 1),
            ("step20_sorted_prefill", "consume", 2),
            ("step22_sparse_weights", "consume", 1),
            ("step22_sparse_weights", "consume", 2),
            ("step15_wgmma_int8", "consume", 1),
            ("step15_wgmma_int8", "consume", 2),
        )
    },
    **{
        ("wgmma_float16", "w4a16_persistent", f"wait_for_all_but_one({acc})", i, "left out"): (
            COVERED
        )
        for acc, i in (("acc1", 1), ("acc1", 2), ("acc", 3))
    },
    ("wgmma_float16", "w4a16_persistent", "griddepcontrol_wait()", 2, "left out"): MET,
    ("wgmma_products", "multiply", "wgmma_fence()", 2, "left out"): MADE,
    ("cp_async", "kernel", "cp_async_wait(0)", 1, LATER): EMPTY,
    (
        "step21_chained_products",
        "w4a16_chained_products",
        "mbarrier_wait(shared, full + MBARRIER * oldest, oldest_parity)",
        1,
        "left out",
    ): FEWER,
}
"""Mutations that change no result, by `Site.key`, and why, as the page says too. One that is
noticed after all, or that no step has any more, fails the test."""


def problem_with(outcome: Outcome) -> str | None:
    """What a test says of an outcome; None where it is as it should be."""
    site = outcome.site
    listed = EQUIVALENT.get(site.key)
    if outcome.by is None and listed is None:
        return f"nothing notices {site}"
    if outcome.by is not None and listed is not None:
        return f"{site} is in EQUIVALENT and is noticed: {outcome.by} ({outcome.on})"
    return None


def stale() -> list[Key]:
    """What EQUIVALENT names and no step has."""
    there = {site.key for label in SUBJECTS for site in device_sites(label)}
    return [key for key in EQUIVALENT if key not in there]


# --- the table ------------------------------------------------------------------------------------

COLUMNS: Final = ("race", "deadlock", "misuse", "wrong result", "machine code", "other", "nothing")
"""What notices a mutation, in the order of the table."""

LINE: Final = re.compile(r"(?m)^\| (?:step|kernel)\d+ \|.*\n")
"""Of a lesson or kernel, in the table of the page."""


def row(label: str, outcomes: Sequence[Outcome]) -> str:
    """A line of the table: how many mutations, and how many each noticed."""
    counts = Counter(outcome.by or "nothing" for outcome in outcomes)
    counts["other"] = sum(counts[by] for by in counts if by not in COLUMNS)
    cells = (label, len(outcomes), *(counts[name] or "" for name in COLUMNS))
    return f"| {' | '.join(map(str, cells))} |\n"


def rows_of(page: str) -> dict[str, list[int]]:
    """The numbers of each line of the table, by lesson or kernel."""
    lines = (line[2:-3].split(" | ") for line in LINE.findall(page))
    return {line[0]: [int(cell.strip() or 0) for cell in line[1:]] for line in lines}


def with_rows(page: str, rows: Iterable[str]) -> str:
    """The page with these lines, in the order of the ladder, and their sums."""
    lines = "".join(sorted(rows, key=lambda one: [*SUBJECTS].index(one.split()[1])))
    total, *by = map(sum, zip(*rows_of(lines).values(), strict=True))
    found = ", ".join(f"{name} {count}" for name, count in zip(COLUMNS, by, strict=True))
    page = re.sub(
        r"(?m)^\d+ mutations, noticed by: .*\.$", f"{total} mutations, noticed by: {found}.", page
    )
    first = LINE.search(page)
    assert first
    rest = LINE.sub("", page)
    return rest[: first.start()] + lines + rest[first.start() :]


def main(arguments: Sequence[str]) -> int:
    """Tries the mutations of all steps, or of some, and writes their rows of the table."""
    wrong = []
    labels = arguments or [*SUBJECTS]
    if unknown := [label for label in labels if label not in SUBJECTS]:
        sys.exit(f"{unknown[0]} is none of {', '.join(SUBJECTS)}")
    page = TABLE.read_text(encoding="utf-8")
    rows = [each for each in LINE.findall(page) if each.split()[1] not in labels]
    for label in labels:
        outcomes = []
        for site in own_sites(label):
            begun = time.process_time()
            outcomes.append(outcome := tried(site, label))
            by, seconds = outcome.by or "NOTHING", time.process_time() - begun
            print(f"{seconds:5.2f} s  {label}  {by}: {site}  [{outcome.on}]")
            print(f"         {outcome.said[:250]}", flush=True)
            if said := problem_with(outcome):
                wrong.append(said)
        if outcomes:
            rows.append(row(label, outcomes))
    TABLE.write_text(with_rows(page, rows), encoding="utf-8")
    print(f"wrote {TABLE.relative_to(ROOT)}", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
