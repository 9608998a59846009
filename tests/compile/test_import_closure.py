"""The import closure of a module, and the hash over its code."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

from steps.compile.import_closure import (
    ROOMS,
    ROOT,
    _imports_and_digest,
    closure_hash,
    code_only,
    import_closure,
)

STEP = "steps.step07_idea"


def test_imports_are_followed_wherever_they_stand(tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    (folder / "room").mkdir(parents=True)
    (folder / "step07_idea.py").write_text(
        "import numpy\nimport steps.first\nfrom steps import second\n"
        "def f():\n    from steps.room.third import x as y\n"
        "from steps import room\nfrom steps.simulator import cuda\n"
    )
    (folder / "room" / "__init__.py").write_text("if 1:\n    from steps.fourth import z\n")
    (folder / "room" / "third.py").write_text("x = 1\n")
    (folder / "simulator").mkdir()
    for name in ("first", "second", "fourth", "fifth", "simulator/cuda"):
        (folder / f"{name}.py").write_text("x = 1\n")
    found = import_closure([STEP], tmp_path)
    assert sorted(found) == [
        *("steps.first", "steps.fourth", "steps.room", "steps.room.third", "steps.second"),
        "steps.step07_idea",
    ]
    before = closure_hash([STEP], tmp_path)
    (folder / "step07_idea.py").write_text("def broken(:\n")
    assert closure_hash([STEP], tmp_path) != before


def test_code_is_neither_prose_nor_imports() -> None:
    code = 'def f(x):\n    return f"{x} # not a comment"\n'
    prose = (
        '"""A module."""\nfrom a import (\n    b,\n    c,\n)\n\n# why\n'
        'def f(x):\n    """Two\n    lines."""\n    import math\n\n'
        '    return f"{x} # not a comment"  # said so\n'
    )
    assert code_only(prose) == code_only(code)
    assert code_only(code.replace("not a", "a")) != code_only(code)


LITERALS = (
    "x = '# no comment'  # a comment\n",
    'x = "\\"# no comment"  # a comment\n',
    "x = r'\\'  # no comment'  # a comment\n",
    'x = r"it\'s\\\\"  # a comment\n',
    'x = f"{y!r:#x} # no comment"  # a comment\n',
    "x = b'#', '', \"\", '\\\\'  # ''' a comment\n",
    "x = ('a' # a comment\n     'b') # it's a comment\n",
    'x = ("""a # no comment\n\n"" # nor this\\""" """)  # a comment\n',
    "def f():\n    '''Prose \"\"\" # prose.'''\n    return 1  # ''' a comment\n",
)


def without_comments(source: str) -> str:
    """As `tokenize` finds them."""
    lines = source.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column] + "\n"
    return "".join(lines)


def imports_and_code(source: str) -> tuple[list[tuple[str, str]], list[str]]:
    """(module, name or "") of each import, and the lines that are neither prose nor imports; as
    `ast` finds them."""
    imports: list[tuple[str, str]] = []
    lines = without_comments(source).splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imports += [(one.name, "") for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports += [(node.module or "", one.name) for one in node.names]
        elif not (isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", 0), str)):
            continue
        for row in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            lines[row - 1] = ""
    return sorted(imports), [line.rstrip() for line in lines if line.strip()]


def test_prose_and_imports_of_every_file_are_those_of_the_language() -> None:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    assert len(files) > 200
    for path in files:
        source = path.read_text(encoding="utf-8")
        imports, lines = imports_and_code(source)
        assert code_only(source).splitlines() == lines, path
        assert sorted(_imports_and_digest(source)[0]) == imports, path


STATEMENTS = (
    '"""A module."""\nx = 1\n',
    "x = 1\n'after a name'  # why\n",
    'x = (\n    "no prose"\n    "nor this"\n)\n',
    "x = [\n    'no prose'\n]\n'prose'\n",
    'x = \\\n    "no prose"\n',
    '"no prose".join(x)\n',
    "def f():\n    '''Prose [ of\n\n    import lines'''\n    return x['import']\n",
    "x = '''\nimport nothing\n'''\nimport a.b as c, d\n",
    "from a.b import (  # why (so)\n    c as d,\n    # not e,\n    f,\n)  # a comment\n",
    "from a import b, c  # not d\nimporter = 1\n",
    "try:\n    import a\nexcept ImportError:\n    from b import a\n",
    "def f(x):\n    yield from x\n    raise E from x\n",
)


AROUND = (
    "if x:\n    pass\nelse:\n    {}\n",
    "try:\n    pass\nexcept E:\n    {}\n",
    "try:\n    pass\nfinally:\n    {}\n",
    "match x:\n    case 1:\n        {}\n",
    "class C:\n    async def f(self):\n        for x in y:\n            {}\n",
    "with x:\n    while y:\n        {}\n",
)
IMPORTS = (one.format("from steps.first import x") for one in AROUND)


@pytest.mark.parametrize("source", [*LITERALS, *STATEMENTS, *IMPORTS])
def test_comments_prose_and_imports_are_those_of_the_language(source: str) -> None:
    stripped = without_comments(source)
    assert "a comment" not in stripped
    assert ast.dump(ast.parse(stripped)) == ast.dump(ast.parse(source))
    imports, lines = imports_and_code(source)
    assert code_only(source).splitlines() == lines
    assert sorted(_imports_and_digest(source)[0]) == imports


def test_a_file_by_another_name_is_the_same_code(tmp_path: Path) -> None:
    """Wherever its new name stands among the others."""
    folder = tmp_path / "steps"
    folder.mkdir()
    hashes = set()
    for name in ("a", "z"):
        imports = "".join(f"import steps.{one}\n" for one in sorted((name, "m")))
        (folder / "step07_idea.py").write_text(f"{imports}x = 1\n")
        (folder / "m.py").write_text("m = 1\n")
        (folder / f"{name}.py").write_text("y = 2\n")
        assert len(import_closure([STEP], tmp_path)) == 3
        hashes.add(closure_hash([STEP], tmp_path))
    assert len(hashes) == 1


def test_two_files_that_swap_a_line_are_other_code(tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    folder.mkdir()
    (folder / "step07_idea.py").write_text("from steps.b import x\nfrom steps.c import y\n")
    (folder / "b.py").write_text("x = 1\nz = 2\n")
    (folder / "c.py").write_text("y = 3\n")
    before = closure_hash([STEP], tmp_path)
    (folder / "b.py").write_text("x = 1\n")
    (folder / "c.py").write_text("z = 2\ny = 3\n")
    assert closure_hash([STEP], tmp_path) != before
