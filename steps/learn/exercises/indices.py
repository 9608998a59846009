"""An index that is out of range, in words: the expression that makes it, what its names hold, and
which of them is another one in the step's own kernel."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from steps.contract import Step
from steps.learn.exercises.beside import Loads
from steps.learn.exercises.rerun import run_again
from steps.learn.exercises.trial import Fault, File, Subject

_FLAT: Final = re.compile(r"(?P<name>\w+): \d+ bytes at index (?P<index>-?\d+) ")
_MANY: Final = re.compile(r"(?P<name>\w+)\[(?P<index>[-\d, ]+)\] is outside")
_ARITHMETIC: Final = (
    *(ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.Load),
    *(ast.operator, ast.unaryop),
)

Block = tuple[int, int, int]


class Index(NamedTuple):
    """What makes an index: an expression, a tuple of them where the array has several axes."""

    tree: ast.expr

    @property
    def text(self) -> str:
        """As a subscript has it."""
        text = ast.unparse(self.tree)
        return text[1:-1] if isinstance(self.tree, ast.Tuple) else text

    @property
    def places(self) -> list[str]:
        """The names in it, one as often as it is there."""
        return [one.id for one in ast.walk(self.tree) if isinstance(one, ast.Name)]

    def value(self, values: Mapping[str, int]) -> tuple[int, ...] | None:
        """None for one that is more than arithmetic of known numbers."""
        if not all(isinstance(one, _ARITHMETIC) for one in ast.walk(self.tree)):
            return None
        try:
            code = compile(ast.Expression(self.tree), "index", "eval")
            found = eval(code, {"__builtins__": {}}, dict(values))
            return tuple(map(int, found if isinstance(found, tuple) else (found,)))
        except (NameError, TypeError, ValueError, ArithmeticError):
            return None

    def replaced(self, place: int, new: str) -> Index:
        """Another name at one of the places."""
        tree = copy.deepcopy(self.tree)
        [one for one in ast.walk(tree) if isinstance(one, ast.Name)][place].id = new
        return Index(tree)


def why_out_of_range(
    fault: Fault, subject: Subject, step: Step, right: Step | None, file: File
) -> tuple[str, ...]:
    """What the index is made of, and which name makes it one of the step's own kernel, if that is
    all; nothing where the line does not tell."""
    found = _FLAT.match(fault.what) or _MANY.match(fault.what)
    own = None if found is None else _index_at(file.path, fault.line, found["name"])
    if found is None or own is None or (value := own.value(fault.values)) is None:
        return ()
    known = ", ".join(f"{name} = {fault.values[name]}" for name in dict.fromkeys(own.places))
    said = f"The index is `{own.text}`" + (f", with {known}" if known else "")
    seen = Loads(file.path, _three(fault.block))
    launch = run_again(right or step, subject, trace=seen).launch
    x, y, z = (*launch.block, 1, 1)[:3]
    axes = dict(_thread_names(file.path))
    if ends := _ends(own, fault, axes, (x, y, z)):
        said += f"; over the threads of this block it runs from {ends}"
    if right is None or found["name"] not in seen.arrays:
        return (f"{said}.",)
    shape, dtype = seen.arrays[found["name"]]
    i, j, k = _three(fault.thread)
    thread = i + x * (j + y * k)
    wanted = {at for at, _ in seen.loads[thread][found["name"]]}
    wanted |= {at for who, name, at in seen.stored if (who, name) == (thread, found["name"])}
    index = tuple(map(int, found["index"].split(",")))

    def fits(makes: tuple[int, ...] | None) -> bool:
        if makes is None or makes == value:
            return False
        moved = [i + b - a for i, a, b in zip(index, value, makes, strict=len(index) == 1)]
        element = _element(moved, shape)
        return element >= 0 and element * dtype.itemsize in wanted

    theirs = "it is a place that this thread comes to in the step's own kernel"
    for place, old in enumerate(own.places):
        for new in axes if old in axes else ():
            other = own.replaced(place, new)
            if fits(other.value(fault.values)):
                return f"{said}.", f"With {new} for {old}, `{other.text}`, {theirs}."
    for old in dict.fromkeys(own.places):
        if old not in axes and fits(own.value({**fault.values, old: 0})):
            return f"{said}.", f"Without {old} {theirs}."
    return (f"{said}.",)


def _three(index: str) -> Block:
    x, y, z = map(int, index.split(","))
    return x, y, z


def _element(index: list[int], shape: tuple[int, ...]) -> int:
    """Elements before it in an array; -1 outside."""
    if len(index) == 1:
        return index[0]
    inside = len(index) == len(shape) and all(0 <= i < n for i, n in zip(index, shape, strict=True))
    return int(np.ravel_multi_index(index, shape)) if inside else -1


def _ends(own: Index, fault: Fault, axes: Mapping[str, int], block: Block) -> str:
    """ "0 to 95", of two axes "0 to 31, 32 to 63"; "" where it is the same in all threads."""
    names = [name for name in dict.fromkeys(own.places) if name in axes]
    found = []
    for place in product(*(range(block[axes[name]]) for name in names)):
        if (value := own.value({**fault.values, **dict(zip(names, place, strict=True))})) is None:
            return ""
        found.append(value)
    axis = list(zip(*found, strict=True))
    return ", ".join(f"{min(one)} to {max(one)}" for one in axis) if len({*found}) > 1 else ""


def _thread_names(path: Path) -> Iterator[tuple[str, int]]:
    """(name, axis) of what a file assigns from cuda.threadIdx."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Assign):
            continue
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=False))
        for name, of in pairs:
            axis = ast.unparse(of).removeprefix("cuda.threadIdx.")
            if isinstance(name, ast.Name) and axis in ("x", "y", "z"):
                yield name.id, "xyz".index(axis)


def _index_at(path: Path, line: int, array: str) -> Index | None:
    """The index of an array in the statement at a line: in brackets, or behind the array in a call
    such as load_u32(w, at). A name in it that is assigned arithmetic above stands for that."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    around = [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.FunctionDef) and one.lineno <= line <= (one.end_lineno or 0)
    ]
    if not around:
        return None
    function = max(around, key=lambda one: one.lineno)
    assigned = {
        one.targets[0].id: one.value
        for one in sorted(
            (one for one in ast.walk(function) if isinstance(one, ast.Assign)),
            key=lambda one: one.lineno,
        )
        if one.lineno <= line
        and isinstance(one.targets[0], ast.Name)
        and isinstance(one.value, ast.BinOp)
        and all(isinstance(part, _ARITHMETIC) for part in ast.walk(one.value))
    }
    for node in ast.walk(function):
        if not isinstance(node, ast.expr) or not node.lineno <= line <= (node.end_lineno or 0):
            continue
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == array:
            return Index(_Inlined(assigned).visit(copy.deepcopy(node.slice)))
        if isinstance(node, ast.Call):
            args = [ast.unparse(one) for one in node.args]
            if array in args[:-1]:
                behind = node.args[args.index(array) + 1]
                return Index(_Inlined(assigned).visit(copy.deepcopy(behind)))
    return None


class _Inlined(ast.NodeTransformer):
    """Names replaced by what they are assigned."""

    def __init__(self, assigned: Mapping[str, ast.expr]) -> None:
        self.assigned = assigned

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.assigned.get(node.id, node))
