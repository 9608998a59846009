"""Which code a kernel is made of: the import closure of a module, and a hash over it.

The *import closure* of a module is the module and what it imports of `steps` and `qformats`, and
what those import in turn, wherever in a file the import stands. So activation passes, unpackers and
components are in it, and no list of names has to be kept. `steps.simulator` is left out: it never
runs on a GPU.

The hash covers code: comments, docstrings, blank lines and import statements are left out, and so
are file names. It changes with the code, not with its prose and not when a file moves. Measured
rows (`results.record.provenance`) and compiled kernels (`steps.api.kernel_cache`) carry it.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
ROOMS: Final = ("steps", "qformats")
NEVER_ON_A_GPU: Final = "steps.simulator"

_STRING_OR_COMMENT: Final = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\''''
    r"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\#[^\n]*""",
    re.DOTALL,
)
"""Python's literals and comments; `tokenize` finds the same ones in ten times the time."""


def module_path(module: str, root: Path = ROOT) -> Path | None:
    """The file of a module or package, None where there is none."""
    base = root / module.replace(".", "/")
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def import_closure(
    modules: Iterable[str], root: Path = ROOT, without: Collection[str] = ()
) -> dict[str, Path]:
    """Modules and all that they import, by name; without some, and what these alone import."""
    found: dict[str, Path] = {}
    waiting = list(modules)
    path_of = cache(partial(module_path, root=root))
    while waiting:
        module = waiting.pop()
        path = None if module in found or module in without else path_of(module)
        if path is None:
            continue
        found[module] = path
        for base, name in _imports_and_digest(path.read_text(encoding="utf-8"))[0]:
            whole = f"{base}.{name}" if name else base
            if base.split(".")[0] not in ROOMS or f"{whole}.".startswith(f"{NEVER_ON_A_GPU}."):
                continue
            waiting.append(whole if path_of(whole) else base)
    return found


def closure_hash(modules: Iterable[str], root: Path = ROOT, without: Collection[str] = ()) -> str:
    """12 hex digits over the code of the import closure.

    The text is hashed rather than the syntax tree, whose dump differs between Python versions: a
    run may be made under one and checked under another. Files are ordered by what they hold, as
    their names may change.
    """
    files = import_closure(modules, root, without).values()
    parts = sorted(_imports_and_digest(path.read_text(encoding="utf-8"))[1] for path in files)
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


@lru_cache(maxsize=512)
def _imports_and_digest(source: str) -> tuple[tuple[tuple[str, str], ...], bytes]:
    """(module, name or "") of every import in a file, wherever it stands; a digest of its code."""
    imports, code = _parsed(source)
    return imports, hashlib.sha256(code.encode()).digest()


def code_only(source: str) -> str:
    """Python source without comments, docstrings, imports, blank lines and trailing blanks.

    Text that is not Python (a file being edited) is its own code: it equals no recorded hash.
    """
    return _parsed(source)[1]


def _parsed(source: str) -> tuple[tuple[tuple[str, str], ...], str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return (), source
    lines = _STRING_OR_COMMENT.sub(_no_comment, source).splitlines()
    imports: list[tuple[str, str]] = []
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            imports += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports += [(node.module or "", alias.name) for alias in node.names]
        elif not (isinstance(node, ast.Expr) and _is_text(node.value)):
            continue
        for row in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            lines[row - 1] = ""
    return tuple(imports), "\n".join(line.rstrip() for line in lines if line.strip())


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Every statement, in no order: `ast.walk` also looks at expressions, ten times as many."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt):
            yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, name, ())


def _no_comment(found: re.Match[str]) -> str:
    return "" if found[0].startswith("#") else found[0]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
