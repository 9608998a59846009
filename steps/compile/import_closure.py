"""Which code a kernel is made of: the import closure of a module, and a hash over it.

The *import closure* of a module is the module and what it imports of `steps` and `qformats`, and
what those import in turn, wherever in a file the import stands. So activation passes, unpacking and
tiles are in it, and no list of names has to be kept. `steps.simulator` is left out: it never
runs on a GPU.

The hash covers code: comments, docstrings, blank lines and import statements are left out, and so
are file names. It changes with the code, not with its prose and not when a file moves. Measured
rows (`results.record.provenance`) and compiled kernels (`steps.compile.kernel_cache`) carry it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
ROOMS: Final = ("steps", "qformats")
NEVER_ON_A_GPU: Final = "steps.simulator"

_TOKEN: Final = re.compile(
    r'''(?P<string>"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\''''
    r"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
    r"|(?P<comment>#[^\n]*)|(?P<opening>[(\[{])|(?P<closing>[)\]}])"
    r"|^[ \t]*(?P<imported>(?:from[ ]+(?P<module>[\w.]+)[ ]+)?import[ ]+"
    r"(?P<names>\((?:#[^\n]*|[^)#])*\)|[^#\n]*))",
    re.DOTALL | re.MULTILINE,
)
"""What tells prose and imports from code. `ast` finds the same in three times the time, for which
the first product of a process would wait."""
_ENDS_HERE: Final = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)")


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
            file = path_of(base)
            has_modules = file is None or file.stem == "__init__"
            waiting.append(whole if has_modules and path_of(whole) else base)
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
    """Python source without comments, docstrings, imports, blank lines and trailing blanks."""
    return _parsed(source)[1]


def _parsed(source: str) -> tuple[tuple[tuple[str, str], ...], str]:
    """(imports, code) of a file that ruff has formatted: a statement has its lines to itself."""
    imports: list[tuple[str, str]] = []
    kept: list[str] = []
    depth, at = 0, 0  # open brackets; where the text begins that is looked at next
    for found in _TOKEN.finditer(source):
        kind, (start, end) = found.lastgroup, found.span()
        if kind == "opening":
            depth += 1
        elif kind == "closing":
            depth -= 1
        elif kind == "imported":
            imports += _names(found["module"], found["names"])
        if kind in ("comment", "imported") or (
            kind == "string" and not depth and _is_alone(source, start, end)
        ):
            kept.append(source[at:start])
            at = end
    kept.append(source[at:])
    lines = "".join(kept).splitlines()
    return tuple(imports), "\n".join(line.rstrip() for line in lines if line.strip())


def _is_alone(source: str, start: int, end: int) -> bool:
    """Whether a literal outside of brackets is a statement: nothing else is on its lines."""
    line = source.rfind("\n", 0, start) + 1
    begins = not source[line:start].strip() and not source.endswith("\\\n", 0, line)
    return begins and bool(_ENDS_HERE.match(source, end))


def _names(module: str | None, names: str) -> list[tuple[str, str]]:
    """(module, name or "") of each name that a statement imports."""
    listed = re.sub(r"#[^\n]*|[()]", "", names).split(",")
    each = [one.split()[0] for one in listed if one.strip()]
    return [(module, one) if module else (one, "") for one in each]
