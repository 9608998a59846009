"""The cache of compiled kernels: found by what they depend on, whole or not at all."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import cuda, float32, types

from steps.compile import compiler as compiling
from steps.compile import kernel_cache, kernel_key
from steps.compile.compiler import compiled
from steps.compile.import_closure import ROOT, closure_hash, import_closure
from steps.compile.kernel_cache import CompiledKernel, cache_folder, clear, entries
from steps.compile.kernel_key import key_of
from steps.contract import Launch, Work
from steps.driver.launcher import load
from steps.product.choice import Choice
from steps.registry import find
from tests.compile.cubins import text_of

SIGNATURE = (types.Array(float32, 1, "C"),)
ARCH = "sm_90a"


def make(number: Any) -> Any:
    """A kernel that captures a number, and a device function that captures it, too."""

    @cuda.jit(device=True)
    def plus(x, y=0):
        return x + number + y

    @cuda.jit
    def kernel(x):
        x[0] = plus(x[0])

    return kernel


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path / "kernels"))
    return tmp_path / "kernels"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The architectures of what was compiled; no compiler runs."""
    asked: list[str] = []

    def compile_kernel(kernel: Any, signature: Any, arch: str) -> CompiledKernel:
        asked.append(arch)
        return CompiledKernel(f"entry{len(asked)}", bytes(range(256)) * 40, False)

    monkeypatch.setattr(compiling, "compile_kernel", compile_kernel)
    return asked


def fresh(kernel: Any, arch: str = ARCH) -> CompiledKernel:
    """What another process would get: one that remembers nothing."""
    kernel_cache._known.pop(kernel, None)
    return compiled(kernel, SIGNATURE, arch)


def facts(code: CompiledKernel) -> tuple[Any, ...]:
    return code.name, code.cubin, code.cooperative


# --- found again ----------------------------------------------------------------------------------


def test_a_kernel_is_compiled_once(folder: Path, made: list[str]) -> None:
    kernel = make(1)
    first = compiled(kernel, SIGNATURE, ARCH)
    assert compiled(kernel, SIGNATURE, ARCH) is first
    again, same = fresh(kernel), fresh(make(1))
    assert facts(again) == facts(same) == facts(first)
    assert again is not first
    assert made == [ARCH]
    assert len(list(folder.iterdir())) == 1, "and nothing unfinished"


def test_what_is_kept_is_what_a_launch_needs(folder: Path) -> None:
    kernel = make(3)
    here = compiled(kernel, SIGNATURE, ARCH)
    assert facts(fresh(kernel)) == facts(here)
    assert here.name.encode() in here.cubin, "the entry's symbol"
    offline = compiling.machine_code(kernel, SIGNATURE, ARCH)
    assert text_of(here.cubin) == text_of(offline.cubin)


@pytest.mark.gpu
def test_a_kernel_of_the_disk_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = make(1), cuda.to_device(np.zeros(1, np.float32))
    launch = Launch(kernel, (1,), (1,), (x,))
    load(launch)()
    kernel_cache._known.pop(kernel)
    monkeypatch.setattr(compiling, "compile_kernel", None)  # nothing is compiled
    load(launch)()
    assert x.copy_to_host()[0] == 2


FIRST_PRODUCT = """
import time
import numpy as np
from qformats import quantize
from steps import gemm
a, w = np.ones((64, 1024), np.float32), quantize(np.ones((512, 1024), np.float32), "q4_0")
began = time.perf_counter()
gemm(a, w)
print(time.perf_counter() - began)
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.alone
def test_the_first_product_of_a_process_is_there_in_half_a_second(
    folder: Path, tmp_path: Path
) -> None:
    """With the driver's start, which is longer with each GPU that it finds, and the CUDA context.
    The first of these compiles, and leaves Python's bytecode, as an installed program has it."""
    command = [sys.executable, "-c", FIRST_PRODUCT]
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}
    one_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    variables = {**os.environ, **bytecode, "CUDA_VISIBLE_DEVICES": one_gpu}
    seconds = [float(subprocess.check_output(command, cwd=ROOT, env=variables)) for _ in range(4)]
    assert len(list(folder.iterdir())) > 0
    assert min(seconds[1:]) < 0.5, seconds


def in_process(*arguments: str) -> subprocess.Popen[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.compile.cached_process", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> list[tuple[int, float, str]]:
    """(kernels that were compiled, CPU seconds after imports, what the driver would get), for each
    compute capability"""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    told = [json.loads(line) for line in output.splitlines()]
    return [(compiled, seconds, str(code)) for compiled, seconds, *code in told]


@pytest.mark.slow
def test_two_processes_and_two_writers_at_once(folder: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    writers = [in_process("--when", str(start)) for _ in range(2)]
    time.sleep(1)
    start.touch()
    ((count, _, code),), (second,) = map(said, writers)
    assert (count, code) == (1, second[2])
    assert [path.suffix for path in folder.iterdir()] == [".kernel"]
    (count, seconds, again), (compiled, _, other) = said(in_process("9.0", "8.0"))
    assert (count, again) == (0, code)
    assert seconds < 1, "0.3 on a quiet machine"
    assert compiled == 1
    assert other != code
    assert len(list(entries(folder))) == 2


# --- files that cannot be trusted -----------------------------------------------------------------


FACTS = b'{"key": {"kernel": "k", "arch": "a"}, "name": "e", "cooperative": false}'
LINES = {
    "not JSON": b"JSON",
    "JSON within JSON": b"[" * 200_000,
    "a key that is a list": FACTS.replace(b'{"kernel": "k", "arch": "a"}', b"[1]"),
    "a word for a truth": FACTS.replace(b"false", b'"x"'),
}
"""What a file with the right digest may say of its kernel."""


def damaged(data: bytes, how: str) -> bytes:
    """A file of the cache as a crash, a failing disk or another program leaves it."""
    if how == "a flipped byte of the cubin":
        return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]
    if how == "a flipped byte of the facts":
        at = data.index(b'"name"') + 10
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    if how == "more at its end":
        return data + b"\0"
    if how == "another program's":
        return b'{"name": "entry1"}\n' + data.partition(b"\n")[2]
    if how in LINES:
        rest = LINES[how] + b"\ncubin"
        return kernel_cache._digest(rest) + b"\n" + rest
    lengths = {"empty": 0, "cut in the digest": 60, "cut in the facts": 300, "cut at its end": -1}
    return data[: lengths[how]]


@pytest.mark.parametrize(
    "how",
    [
        *("empty", "cut in the digest", "cut in the facts", "cut at its end", "more at its end"),
        *("a flipped byte of the cubin", "a flipped byte of the facts", "another program's"),
        *LINES,
    ],
)
def test_a_damaged_file_is_ignored_and_written_anew(
    how: str, folder: Path, made: list[str]
) -> None:
    kernel = make(1)
    compiled(kernel, SIGNATURE, ARCH)
    (path,) = folder.iterdir()
    path.write_bytes(damaged(path.read_bytes(), how))
    assert list(entries(folder)) == []
    assert fresh(kernel).name == "entry2", "compiled again"
    assert fresh(kernel).name == "entry2"
    assert len(made) == 2
    assert list(folder.iterdir()) == [path]


def test_another_kernels_file_is_not_taken(folder: Path, made: list[str]) -> None:
    one, other = make(1), make(2)
    compiled(one, SIGNATURE, ARCH)
    (first,) = folder.iterdir()
    compiled(other, SIGNATURE, ARCH)
    (second,) = set(folder.iterdir()) - {first}
    shutil.copy(first, second)
    assert fresh(other).name == "entry3"
    assert fresh(one).name == "entry1"


def test_a_process_that_is_killed_while_it_writes_leaves_no_kernel(
    folder: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            compiled(make(1), SIGNATURE, ARCH)
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_cleared_while_it_is_written_is_no_warning(
    folder: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def cleared(self: Path, data: bytes) -> None:
        write(self, data)
        assert clear(folder) == 1

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", cleared)
        assert compiled(make(1), SIGNATURE, ARCH).name == "entry1"
    assert list(folder.iterdir()) == []


def kept(kernel: Any, folder: Path) -> Path:
    """The only file, of a kernel that was compiled now."""
    assert compiled(kernel, SIGNATURE, ARCH).name == "entry1"
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_not_read(mode: int, folder: Path, made: list[str]) -> None:
    kernel = make(1)
    path = kept(kernel, folder)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(mode)
    sentence = f"{path} may be written by others (mode {mode:o}): it is not read, but compiled and"
    with pytest.warns(RuntimeWarning, match=re.escape(sentence)):
        assert fresh(kernel).name == "entry2"
    assert path.stat().st_mode & 0o777 == 0o600, "written anew"
    assert fresh(kernel).name == "entry2"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_is_not_used(
    mode: int, folder: Path, made: list[str]
) -> None:
    kernel = make(1)
    path = kept(kernel, folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(mode)
    sentence = f"in memory alone: {folder} may be written by others (mode {mode:o}). Set LADDER_"
    with pytest.warns(RuntimeWarning, match=re.escape(sentence)):
        assert fresh(kernel).name == "entry2"
    assert compiled(kernel, SIGNATURE, ARCH).name == "entry2", "in memory it is kept"
    compiled(make(2), SIGNATURE, ARCH)  # another warning would be an error
    assert list(folder.iterdir()) == [path]
    folder.chmod(0o755)
    assert fresh(kernel).name == "entry1"


def test_what_another_user_owns_is_not_safe() -> None:
    def of(uid: int, mode: int = 0o100600) -> str | None:
        return kernel_cache._why_not_safe(os.stat_result((mode, 1, 1, 1, uid, uid, 0, 0, 0, 0)))

    own = os.geteuid()
    assert of(own) is of(0) is of(own, 0o40755) is None
    assert of(own + 1) == f"belongs to another user (uid {own + 1})"


@pytest.mark.parametrize("kind", ["FIFO", "link"])
def test_what_is_no_file_is_not_read(kind: str, folder: Path, made: list[str]) -> None:
    kernel = make(1)
    path = kept(kernel, folder)
    elsewhere = path.rename(folder.parent / "kernel")
    if kind == "FIFO":
        os.mkfifo(path, 0o600)
    else:
        path.symlink_to(elsewhere)
    signal.alarm(20)  # an open FIFO would wait for good
    try:
        assert list(entries(folder)) == []
        assert fresh(kernel).name == "entry2"
        assert path.is_file()
        assert not path.is_symlink()
    finally:
        signal.alarm(0)


def test_what_a_killed_process_left_is_removed_and_counted(
    folder: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kept(make(1), folder)
    dead, alive = folder / "1.unfinished", folder / "2.unfinished"
    for one in (dead, alive):
        one.write_bytes(bytes(1000))
    os.utime(dead, (0, time.time() - kernel_cache.UNFINISHED_SECONDS - 60))
    compiled(make(2), SIGNATURE, ARCH)
    assert alive.exists()
    assert path.exists()
    assert not dead.exists()
    os.utime(alive, (0, 1000 + time.time() - kernel_cache.UNFINISHED_SECONDS))
    monkeypatch.setattr(kernel_cache, "MOST_BYTES", 3 * path.stat().st_size + 500)
    compiled(make(3), SIGNATURE, ARCH)
    assert not alive.exists(), "there are too many bytes with it, and it is the oldest"
    assert path.exists()


# --- where ----------------------------------------------------------------------------------------


def test_it_is_switched_off_and_moved(tmp_path: Path, made: list[str], monkeypatch: Any) -> None:
    for word in ("off", "OFF"):
        monkeypatch.setenv(kernel_cache.VARIABLE, word)
        assert cache_folder() is None
    kernel = make(1)
    assert [fresh(kernel).name for _ in range(2)] == ["entry1", "entry2"]
    for variable in ("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(variable, str(tmp_path))
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv(kernel_cache.VARIABLE)
        else:
            monkeypatch.setenv(kernel_cache.VARIABLE, unset)
        default = cache_folder()
        assert default is not None
        assert default.is_relative_to(tmp_path)
        assert "quantized-gemm-ladder" in default.parts
    monkeypatch.setenv(kernel_cache.VARIABLE, "~/elsewhere")
    assert cache_folder() == tmp_path / "elsewhere"


def test_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path / "file" / "kernels"))
    sentence = (
        f"compiled kernels are kept in memory alone: {tmp_path}/file/kernels cannot be written "
        "(Not a directory). Set LADDER_CACHE to a folder of your own, or to off"
    )
    with pytest.warns(RuntimeWarning, match=re.escape(sentence)):
        first = compiled(make(1), SIGNATURE, ARCH)
    second = compiled(make(2), SIGNATURE, ARCH)  # another warning would be an error
    assert (first.name, second.name) == ("entry1", "entry2")


@pytest.mark.parametrize("asked", [None, "~nobody_at_all/kernels"])
def test_without_a_home_kernels_are_in_memory(
    asked: str | None, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user without an entry in the system's list, as in a container."""
    for variable in (kernel_cache.VARIABLE, "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    if asked:
        monkeypatch.setenv(kernel_cache.VARIABLE, asked)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setattr(kernel_cache, "_warned", set())
    sentence = f"in memory alone: there is no home folder{' as in ' + asked if asked else ''}. Set"
    with pytest.warns(RuntimeWarning, match=re.escape(sentence)):
        first = compiled(make(1), SIGNATURE, ARCH)
    second = compiled(make(2), SIGNATURE, ARCH)  # another warning would be an error
    assert (first.name, second.name) == ("entry1", "entry2")


def test_those_used_least_recently_go_first(
    folder: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = [make(number) for number in range(4)]
    for age, kernel in enumerate(kernels[:3]):
        before = set(folder.iterdir()) if folder.exists() else set()
        compiled(kernel, SIGNATURE, ARCH)
        (path,) = set(folder.iterdir()) - before
        os.utime(path, (1000 + age, 1000 + age))
    size = path.stat().st_size
    fresh(kernels[0])  # which makes it the youngest
    monkeypatch.setattr(kernel_cache, "MOST_BYTES", 2 * size + size // 2)
    compiled(kernels[3], SIGNATURE, ARCH)
    assert len(list(folder.iterdir())) == 2
    assert [fresh(kernels[i]).name for i in (0, 3)] == ["entry1", "entry4"]


def test_entries_say_what_they_are_and_can_be_removed(folder: Path, made: list[str]) -> None:
    compiled(make(1), SIGNATURE, ARCH)
    (folder / "other.txt").write_text("not ours")
    (folder / "0123.unfinished").write_text("a process was killed")
    (entry,) = entries(folder)
    assert entry.key["kernel"] == f"{__name__}.kernel"
    assert entry.key["arch"] == ARCH
    assert entry.nbytes == entry.path.stat().st_size > 256 * 40
    assert abs(entry.used - time.time()) < 600
    assert clear(folder) == 2
    assert [path.name for path in folder.iterdir()] == ["other.txt"]
    assert clear(folder / "absent") == 0


# --- what a key depends on ------------------------------------------------------------------------


def key(kernel: Any, signature: Any = SIGNATURE, arch: str = ARCH) -> str:
    found = key_of(kernel, signature, arch)
    assert found is not None
    return json.dumps(found)


def with_options(**options: Any) -> Any:
    return cuda.jit(**options)(make(1).py_func)


def test_every_part_of_a_kernel_is_in_its_key() -> None:
    double = (types.Array(types.float64, 1, "C"),)
    strided = (types.Array(float32, 1, "A"),)
    keys = [
        key(make(1)),
        *(key(make(number)) for number in (2, 1.0, True, np.float32(1), np.int8(1))),
        *(key(make(value)) for value in ((1,), (2,), {"a": 1}, {"a": 2}, "1", b"1", None)),
        *(key(make(np.array(value))) for value in ([1, 2], [2, 1], [1.0, 2.0])),
        *(key(make(function)) for function in (make(1), make(2), facts)),
        *(key(make(1), each) for each in (double, strided, SIGNATURE * 2)),
        *(key(make(1), arch=arch) for arch in ("sm_80", "sm_90")),
        *(key(with_options(**one)) for one in ({"fastmath": True}, {"max_registers": 32})),
        key(with_options(launch_bounds=128)),
    ]
    assert len(set(keys)) == len(keys)
    assert key(make(1)) == keys[0]
    assert key(make({"a": 1, "b": 2})) == key(make({"b": 2, "a": 1}))
    one, other = frozenset((0, 8)), frozenset((8, 0))
    assert list(one) != list(other), "as sets of texts are in two processes"
    assert key(make(one)) == key(make(other))


def test_the_code_of_all_that_it_imports_is_in_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    (launch,) = Choice.of_work(Work(find(1), "A16", "q4_0"), (1, 64, 256)).launches()
    before, asked = key(launch.kernel), list[str]()

    def changed(modules: list[str]) -> str:
        asked.extend(modules)
        return closure_hash(modules) + "x"

    with monkeypatch.context() as patch:
        patch.setattr(kernel_key, "closure_hash", changed)
        kernel_key._code_of.cache_clear()
        assert key(launch.kernel) != before
    kernel_key._code_of.cache_clear()
    assert key(launch.kernel) == before
    assert "steps.blocks.elements" in import_closure(asked)


def test_functions_are_told_apart_by_what_they_do() -> None:
    """And not by the files alone: one may have changed since it was imported."""
    kernel = make(1)
    before = key(kernel)
    function = kernel.py_func.__closure__[0].cell_contents.py_func
    code = function.__code__
    function.__defaults__ = (1,)
    assert key(kernel) != before
    function.__defaults__ = (0,)
    assert key(kernel) == before
    function.__kwdefaults__ = {"y": 1}
    assert key(kernel) != before
    function.__kwdefaults__ = None
    assert key(kernel) == before
    changed = bytes([*code.co_code[:-2], *code.co_code[:2]])
    function.__code__ = code.replace(co_code=changed)
    assert key(kernel) != before


@pytest.mark.parametrize("package", ["numba", "numba-cuda", "nvidia-nvjitlink"])
def test_another_version_of_a_compiler_is_another_key(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(make(1))
    version = kernel_key.metadata.version
    assert version(package)
    monkeypatch.setattr(
        kernel_key.metadata,
        "version",
        lambda name: version(name) + (".1" if name == package else ""),
    )
    kernel_key.compilers.cache_clear()
    try:
        assert key(make(1)) != before
    finally:
        monkeypatch.undo()
        kernel_key.compilers.cache_clear()
    assert key(make(1)) == before


def test_a_toolkit_of_the_system_is_known_by_its_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packages = [name for name in kernel_key.COMPILERS if not name.startswith("nvidia")]
    monkeypatch.setattr(kernel_key, "COMPILERS", packages)
    kernel_key.compilers.cache_clear()
    try:
        found = kernel_key.compilers()
    finally:
        kernel_key.compilers.cache_clear()
    assert set(found) == {"python", *packages, "nvvm", "nvJitLink"}
    assert found["nvvm"].endswith(" bytes")


def test_numbas_settings_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(make(1))
    monkeypatch.setenv("NUMBA_CUDA_DEBUGINFO", "1")
    assert key(make(1)) != before


def test_an_installed_project_has_the_keys_of_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files of NumPy and Numba lie in the same folder."""
    kernel = make((np.float32, json.dumps, cuda.jit))
    before = key(kernel)
    monkeypatch.setattr(kernel_key, "_has_file", lambda module: True)
    assert key(kernel) == before


def test_a_kernel_that_cannot_be_told_from_others_is_not_kept(
    folder: Path, made: list[str]
) -> None:
    typed: dict[str, Any] = {"__name__": "typed_at_a_prompt"}
    exec("def kernel(x):\n    x[0] = 1\n", typed)
    for kernel in (make(object()), cuda.jit(typed["kernel"])):
        assert key_of(kernel, SIGNATURE, ARCH) is None
        name = compiled(kernel, SIGNATURE, ARCH).name
        assert compiled(kernel, SIGNATURE, ARCH).name == name, "in this process it is"
        assert fresh(kernel).name != name
    assert not folder.exists()
