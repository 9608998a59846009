"""A file that ends the process which runs it is told as wrong, by every command that takes one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from steps.cli.main import main
from steps.learn.exercises.apart import Ended, apart
from steps.registry import find, source


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the command remembers what it found."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("command", "end", "says"),
    [
        ("check", "os._exit(0)", "with status 0"),
        ("check", "os.kill(os.getpid(), 9)", "by SIGKILL"),
        ("trace", "os.kill(os.getpid(), 19)", "by SIGSTOP"),
        ("sass", "os._exit(3)", "with status 3"),
    ],
)
def test_an_import_that_ends_the_process_is_wrong(
    command: str, end: str, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = "".join(source(find(1)))
    (tmp_path / "ends.py").write_text(f"{own}import os\nprint('said once')\n{end}\n")
    assert main([command, "--file", "ends.py"]) == (1 if command == "check" else 2)
    said = "".join(capfd.readouterr()).splitlines()
    line = own.count("\n") + 3
    assert said.count("said once") == 1
    assert len(said) == 2
    where = f"ends.py:{line} `{end}` ends the process that runs the file, {says}: leave that out."
    assert said[1].endswith(where)


def test_a_kernel_that_ends_the_process_is_wrong(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "import os\n" + "".join(source(find(1))).replace(
        "c[m, n] = acc", "c[m, n] = acc; os._exit(0)"
    )
    text = text.replace("from __future__ import annotations\n", "")
    (tmp_path / "ends.py").write_text(text)
    assert main(["check", "--file", "ends.py"]) == 1
    said = capfd.readouterr().out.splitlines()
    assert len(said) == 1
    assert "`c[m, n] = acc; os._exit(0)` ends the process that runs the file" in said[0]


def test_what_is_returned_and_raised_comes_back(tmp_path: Path) -> None:
    assert apart(lambda: (os.getpid(), "a" * 200_000), tmp_path)[0] != os.getpid()

    def refuse() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        apart(refuse, tmp_path)
    with pytest.raises(Ended, match="status 7") as caught:
        apart(lambda: os._exit(7), tmp_path)
    assert caught.value.line == 0


def test_an_interrupt_ends_both(tmp_path: Path) -> None:
    parent, began = os.getpid(), tmp_path / "child"

    def work() -> None:
        began.write_text(str(os.getpid()))
        os.kill(parent, signal.SIGINT)
        time.sleep(60)

    # What runs in the background of a shell begins with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            apart(work, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(began.read_text()), 0)
