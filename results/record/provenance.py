"""Which code a row was measured with: a hash over everything that the step imports.

The *closure* of a module is the module and what it imports of `steps` and `qformats`, and what
those import in turn, wherever in a file the import stands. So activation passes, unpackers and
components are in it, and no list of names has to be kept. `steps.simulator` is left out: it never
runs on a GPU.

The hash covers code: comments, docstrings, blank lines and import statements are left out, and so
are file names. A row goes stale with the code, not with its prose and not when a file moves.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Final

from results.record import ROOT
from results.record.schema import Row, Run

ROOMS: Final = ("steps", "qformats")
NEVER_ON_A_GPU: Final = "steps.simulator"
API_MODULES: Final = {"gemm.plan": "steps.api.plan", "QuantLinear": "steps.nn.linear"}
"""What a row of `as_called` calls, by its `api`."""


def module_path(module: str, root: Path = ROOT) -> Path | None:
    """The file of a module or package, None where there is none."""
    base = root / module.replace(".", "/")
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def step_module(step: int, root: Path = ROOT) -> str | None:
    """The module of a step, such as "steps.step04_dp4a_emulated"."""
    found = sorted((root / "steps").glob(f"step{step:02d}_*.py"))
    return f"steps.{found[0].stem}" if found else None


def closure(modules: Iterable[str], root: Path = ROOT) -> dict[str, Path]:
    """Modules and all that they import, by name."""
    found: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        path = None if module in found else module_path(module, root)
        if path is None:
            continue
        found[module] = path
        for base, name in _imports(path.read_text(encoding="utf-8")):
            whole = f"{base}.{name}" if name else base
            if base.split(".")[0] not in ROOMS or f"{whole}.".startswith(f"{NEVER_ON_A_GPU}."):
                continue
            waiting.append(whole if whole in found or module_path(whole, root) else base)
    return found


@lru_cache(maxsize=512)
def _imports(source: str) -> tuple[tuple[str, str], ...]:
    """(module, name or "") of every import in a file, wherever it stands."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a file being edited
        return ()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, alias.name) for alias in node.names]
    return tuple(found)


def hash_of(modules: Iterable[str], root: Path = ROOT) -> str:
    """12 hex digits over the code of the closure.

    The text is hashed rather than the syntax tree, whose dump differs between Python versions: a
    run may be made under one and checked under another. Files are ordered by what they hold, as
    their names may change.
    """
    parts = sorted(
        _digest(path.read_text(encoding="utf-8")) for path in closure(modules, root).values()
    )
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


@lru_cache(maxsize=512)
def _digest(source: str) -> bytes:
    return hashlib.sha256(code_only(source).encode()).digest()


def source_hash(step: int, root: Path = ROOT) -> str | None:
    """The hash of a step's closure; None if the step has no file (any more)."""
    module = step_module(step, root)
    return None if module is None else hash_of([module], root)


def called_hash(api: str, step: int, root: Path = ROOT) -> str | None:
    """The hash of an API of `as_called` together with the step that it chose."""
    module = step_module(step, root)
    return None if module is None else hash_of([API_MODULES[api], module], root)


def code_only(source: str) -> str:
    """Python source without comments, docstrings, imports, blank lines and trailing blanks.

    Text that is not Python (a file being edited) is its own code: it equals no recorded hash.
    """
    lines = source.splitlines()
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        tree = ast.parse(source)
    except (SyntaxError, tokenize.TokenError):
        return source
    for token in tokens:
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and _is_text(node.value)
        ):
            for row in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[row - 1] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_stale(row: Row, root: Path = ROOT) -> bool:
    """Whether the row's step has other code now than when it was measured (or no record of it)."""
    return row.source_hash is None or row.source_hash != source_hash(row.step, root)


def stale_steps(run: Run, root: Path = ROOT) -> frozenset[int]:
    """The steps of a run that cannot be taken as facts about the code in this tree."""
    now = {step: source_hash(step, root) for step in {row.step for row in run.rows}}
    return frozenset(
        row.step for row in run.rows if row.source_hash is None or row.source_hash != now[row.step]
    )


def remembered(of: Callable[..., str | None], root: Path = ROOT) -> Callable[..., str | None]:
    """`source_hash` or `called_hash` that reads the files once: for the length of one bench."""
    return lru_cache(maxsize=None)(lambda *asked: of(*asked, root))
