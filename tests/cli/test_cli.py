"""`python -m steps ...` as a user types it: what it prints, where, and what it returns."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from steps.checks import fuzz
from steps.checks.fuzz_workers import Totals
from steps.checks.select import UsageError
from steps.cli import arguments
from steps.cli import fuzz as fuzz_command
from steps.cli import main as cli
from steps.cli import tools as nvidia
from steps.registry import ladder
from tests.cli.typed import typed

ROOT = Path(__file__).resolve().parents[2]
NO_GPU_HERE = arguments.machines("auto")[2] is not None
without_gpu = pytest.mark.skipif(not NO_GPU_HERE, reason="this machine has a GPU")


def one_sentence(text: str) -> bool:
    return text.count("\n") == 1 and text.endswith("\n") and "Traceback" not in text


# --- what works -----------------------------------------------------------------------------------


def test_list_shows_every_step_with_its_branch_and_home_shapes() -> None:
    done = typed("list")
    assert done.returncode == 0
    assert done.stderr == ""
    for step in ladder():
        homes = " ".join("x".join(map(str, shape)) for shape in step.home_shapes)
        assert re.search(
            rf"^ *{step.number}  {re.escape(step.title)} .* {step.branch} +{homes} ",
            done.stdout,
            re.MULTILINE,
        )


@without_gpu
def test_a_step_runs_in_the_simulator_and_says_so() -> None:
    done = typed("run", "1", "--format", "q4_0,q8_0", "--m", "2", "--n", "3", "--k", "32")
    assert done.returncode == 0
    assert done.stderr == "", "no progress in a pipe"
    first, *_ = done.stdout.splitlines()
    assert first.startswith("No GPU (")
    assert "simulator" in first
    assert "not timed" in first
    rows = [line.split() for line in done.stdout.splitlines() if re.match(r" *1  W", line)]
    assert [row[:3] for row in rows] == [["1", "W4A16", "q4_0"], ["1", "W8A16", "q8_0"]]
    assert all(row[-3:] == ["ok,", "1", "case"] for row in rows)
    assert "\x1b" not in done.stdout, "no colours in a pipe"


def test_json_is_nothing_but_json_and_check_takes_a_machine_and_a_lane_order() -> None:
    done = typed(
        *("check", "3", "--machine", "simulator", "--scheme", "a16", "--format", "q5_1", "--json"),
        *("--m", "3", "--n", "5", "--k", "64", "--dist", "integer", "--order", "-1"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert (data["machine"], data["ok"], data["rows"]) == ("simulator", True, [])
    (one,) = data["checks"]
    assert (one["scheme"], one["format"], one["cases"], one["ok"]) == ("W5A16", "q5_1", 1, True)
    assert one["nmse_same_operands"] == 0, "an exact problem has no error at all"


def test_diff_is_against_the_parent(capsys) -> None:
    done = typed("diff", "4")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "--- steps/step03_shared_tiled.py"
    assert lines[1] == "+++ steps/step04_dp4a_emulated.py"
    assert any(line.startswith("@@") for line in lines)
    assert cli.main(["diff", "4", "--against", "2", "--lines", "0"]) == 0
    assert capsys.readouterr().out.startswith("--- steps/step02_naive_w4a8.py")


def test_machine_code_of_a_step(capsys) -> None:
    for kind, marks in (
        ("ptx", (".visible .entry", ".target sm_80")),
        ("sass", ("EXIT", ".text.", "/*0000*/")),
    ):
        assert cli.main([kind, "2", "--arch", "8.0", "--format", "q4_0"]) == 0
        said = capsys.readouterr().out
        assert said.startswith("w4a8_naive for sm_80: step 2 W4A8 q4_0")
        assert re.search(r"\d+ registers, 0 bytes of stack, spills 0 \+ 0 bytes", said)
        assert re.search(r"^IMAD +\d+$", said, re.MULTILINE)
        for mark in marks:
            assert mark in said


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_machine_code_of_a_dtype(dtype: str, capsys) -> None:
    """Weights become float16 whatever A is. A in float16 has no pass."""
    command = ["sass", "13", "--dtype", dtype, "--format", "q4_0"]
    assert cli.main(command) == 0
    sass = capsys.readouterr().out
    assert ", spills 0 + 0 bytes" in sass
    assert "HGMMA.64x128x16.F32" in sass
    assert "BF16" not in sass.replace("F2FP.BF16", "")  # but for C
    assert cli.main([*command, "--activations", "--summary"]) == (0 if dtype == "bfloat16" else 2)
    assert ("no activation pass" in capsys.readouterr().err) == (dtype == "float16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_steps_are_checked_in_a_dtype(dtype: str, capsys) -> None:
    command = ["check", "5", "13", "--format", "q4_0", "--m", "3", "--n", "5", "--k", "64"]
    assert cli.main([*command, "--machine", "simulator", "--dtype", dtype, "--long"]) == 0
    title, *_, line = capsys.readouterr().out.splitlines()
    assert title.endswith(f", not timed, C in {dtype}.")
    assert line.split()[:3] == ["13", "W4A16", "q4_0"], "step 5 writes no such C"
    assert float(line.split()[3]) == pytest.approx(*NMSE_IN[dtype])


NMSE_IN = {"float16": (5e-8, 1.0), "bfloat16": (1e-5, 0.9)}
"""Of C rounded to 11 bits and to 8: (about, and how far off it may be as a share of that)."""


def test_fuzz_names_the_case_that_is_wrong(capsys, monkeypatch) -> None:
    """And its line repeats it."""
    assert cli.main(["fuzz", "1", "2", "--seconds", "1", "--seed", "3"]) == 0
    told = capsys.readouterr().out
    assert re.fullmatch(r"\d+ products on the simulator in \d+ s, SEED=3: none wrong\n", told)
    assert cli.main(["fuzz", "1", "--count", "2", "--seed", "3"]) == 0
    assert capsys.readouterr().out.startswith("2 products on the simulator")
    line = "step=1 family=A16 format=q4_0 m=2 n=5 k=32"
    monkeypatch.setattr(fuzz, "complaints", lambda *_: ["all of it is wrong"])
    assert cli.main(["fuzz", "--case", line]) == 1
    told = capsys.readouterr().out
    assert "1 case on the simulator" in told
    assert "all of it is wrong\n  again: make fuzz" in told
    assert cli.main(["fuzz", "--case", re.search(r'CASE="(.*)"', told)[1]]) == 1
    assert cli.main(["fuzz", "--case", "step=0"]) == 2


def _pretended_gpu(monkeypatch, wrong: int, stop: bool = False) -> None:
    """A GPU on which processes find some wrong cases."""

    def fuzz_on_gpus(numbers, seed, seconds, count, jobs, gpus, cc, tell, report) -> Totals:
        assert (list(numbers), seed, seconds, count) == ([1, 2], 3, 60, 1000)
        assert (jobs, gpus, cc) == (5, [0, 2], (9, 0))
        for i in range(wrong):
            tell(f"step={i}", ["is off", "hides it"])
        if stop:
            raise KeyboardInterrupt
        totals = Totals(1000, {"a", "b"}, wrong)
        report(totals)
        return totals

    gpu = SimpleNamespace(cc=(9, 0))
    monkeypatch.setattr(fuzz_command, "machines", lambda _: ("H9", lambda _: gpu, None))
    monkeypatch.setattr(fuzz_command, "gpus_of", lambda cc: [0, 2])
    monkeypatch.setattr(fuzz_command, "fuzz_on_gpus", fuzz_on_gpus)


FUZZ = ["fuzz", "1", "2", "--seed", "3", "--jobs", "5", "--count", "1000"]


def test_fuzz_on_a_gpu_says_how_much(capsys, monkeypatch) -> None:
    _pretended_gpu(monkeypatch, 0)
    assert cli.main(FUZZ) == 0
    told = capsys.readouterr()
    assert told.out.splitlines() == [
        "1000 products of 2 works by 5 processes on 2 of the H9 in 0 s, SEED=3: none wrong",
    ]
    assert told.err == "", "no line of progress in a pipe"


def test_fuzz_tells_some_wrong_cases_and_counts_all(capsys, monkeypatch) -> None:
    _pretended_gpu(monkeypatch, 60)
    assert cli.main(FUZZ) == 1
    told = capsys.readouterr().out
    assert told.startswith('step=0\n  is off\n  hides it\n  again: make fuzz CASE="step=0"\n')
    assert told.count("again: ") == fuzz_command.MOST == 50
    assert "\n... and 10 more\n" in told
    assert told.endswith(" on 2 of the H9 in 0 s, SEED=3: 60 wrong\n")
    assert cli.main([*FUZZ, "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["products"], facts["works"], facts["wrong"]) == (1000, 2, 60)
    assert facts["gpus"] == 2
    assert facts["cases"]["step=59"] == ["is off", "hides it"]


def test_fuzz_that_is_interrupted_says_so(capsys, monkeypatch) -> None:
    _pretended_gpu(monkeypatch, 1, stop=True)
    assert cli.main(FUZZ) == 130
    told = capsys.readouterr()
    assert told.err == "\npython -m steps fuzz: interrupted\n"
    assert told.out.startswith("step=0\n")


# --- what is refused ------------------------------------------------------------------------------

NEEDS_A_GPU = [
    (["run", "1", "--m", "4096", "--n", "4096"], "too many for the simulator"),
    (["check", "1", "--machine", "gpu"], "no CUDA GPU can be used here"),
    *(([name], "no CUDA GPU can be used here") for name in ("bench", "sanitize")),
    *(([name, "4"], "no CUDA GPU can be used here") for name in ("profile", "counters", "launch")),
]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "99"], "there is no step 99: the ladder has steps 1 to "),
        (["run", "four"], "'four' is not a step"),
        (["run", "1", "--k", "33"], "K=33 is not a multiple of the block of 32: use 64"),
        (["run", "1", "--m", "0"], "'0' is not a positive whole number"),
        (["run", "1", "--format", "q9_9"], "unknown format 'q9_9': use q4_0"),
        (["run", "1", "--dist", "zipf"], "invalid choice: 'zipf'"),
        (["run", "1", "--scheme", "W4"], "unknown scheme 'W4'"),
        (["run", "2", "--scheme", "W4A16"], "step 2 is of family A8, not A16"),
        (
            ["run", "1", "--scheme", "W4A16", "--format", "q8_0"],
            "no format asked for is W4A16: q8_0 is W8",
        ),
        (["run", "1", "--seed", "x"], "'x' is not a whole number"),
        (["run", "1", "--bogus"], "does not know --bogus"),
        (["check", "1", "--machine", "tpu"], "invalid choice: 'tpu'"),
        (["check", "5", "--dtype", "float16"], "step 5 writes C as float32, not float16"),
        (["sass", "5", "--dtype", "bfloat16"], "step 5 writes C as float32, not bfloat16"),
        (["diff", "1"], "step 1 has no parent"),
        (["sass", "1", "--arch", "pentium"], "'pentium' is not an architecture"),
        (["sass", "1", "--activations"], "has no activation pass"),
        (["launch"], "STEP"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["step4"], "a step is no command: name one before it, such as `run 4`"),
        (["tune", "--run", "no/run.json"], "no/run.json: No such file or directory"),
        (["check", "4", "--hint"], "hints and solutions are for a file of your own: name it"),
        (["chat", "--ids", "1"], "chat does not know --ids"),
        (["quality", "--gpus", "2"], "quality does not know --gpus"),
        ([], "COMMAND"),
        *(pytest.param(*case, marks=without_gpu) for case in NEEDS_A_GPU),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_requests_get_one_sentence(arguments: list[str], said: str, capsys) -> None:
    try:
        status = cli.main(arguments)
    except SystemExit as stop:  # argparse's own way out
        status = stop.code
    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert one_sentence(printed.err), printed.err
    assert said in printed.err


@pytest.mark.parametrize(
    ("asked", "tools"),
    [
        ([], ["memcheck", "racecheck", "initcheck", "synccheck"]),
        (["--tool", "initcheck memcheck", "synccheck"], ["initcheck", "memcheck", "synccheck"]),
    ],
)
def test_sanitize_runs_every_tool_and_remembers_what_failed(
    asked: list[str], tools: list[str], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    ran: list[list[str]] = []

    def tool(command, hint=""):
        ran.append(command)
        return 1 if command[2] == tools[0] else 0

    monkeypatch.setattr(nvidia, "machines", lambda which: None)
    monkeypatch.setattr(nvidia, "find_tool", lambda name: name)
    monkeypatch.setattr(nvidia, "_run", tool)
    assert cli.main(["sanitize", "2", "--quick", *asked]) == 1
    assert [command[:3] for command in ran] == [["compute-sanitizer", "--tool", t] for t in tools]
    for command in ran:
        assert ("--report-api-errors" in command) == (command[2] == "memcheck")
        assert command[-5:] == ["2", "--quick", "--machine", "gpu", "--small"]
    assert capsys.readouterr().err == f"compute-sanitizer found errors with {tools[0]}\n"


def test_without_greenlet_the_simulator_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setitem(sys.modules, "greenlet", None)
    assert cli.main(["check", "1", "--machine", "simulator"]) == 2
    assert "pip install greenlet" in capsys.readouterr().err


def test_an_interrupt_is_not_a_traceback() -> None:
    """Ctrl-C at a terminal, as soon as the progress line says that a check has begun."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "steps", "check", "--machine", "simulator"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        # a shell's background job, which this suite may be, ignores Ctrl-C and hands that down
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(theirs)
    seen = ""
    while "step 1 W4A16 q4_0" not in seen:
        seen += os.read(ours, 1000).decode()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    with contextlib.suppress(OSError):  # the terminal of a process that has ended
        while more := os.read(ours, 1000).decode():
            seen += more
    os.close(ours)
    assert process.returncode == 130, seen
    assert "Traceback" not in seen
    assert seen.rstrip().endswith("python -m steps check: interrupted")


def test_an_interrupt_while_arguments_are_read(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Which imports packages, for a second."""

    def parser() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_parser", parser)
    assert cli.main(["list"]) == 130
    assert capsys.readouterr().err == "\npython -m steps: interrupted\n"


def test_an_interrupt_within_a_string_is_the_same(tmp_path: Path) -> None:
    """Python remembers it, and would die of the signal when all is done."""
    program = """import steps.cli.main as main

def command(name):
    exec("raise KeyboardInterrupt")

main._command = command
raise SystemExit(main.main(["doctor"]))
"""
    (tmp_path / "interrupted.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "interrupted"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "\npython -m steps doctor: interrupted\n")


def test_a_closed_pipe_is_not_a_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m steps diff 5 --lines 400 | head -n 1",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("--- steps/step04")
    assert done.stderr == ""


def test_steps_by_any_of_their_names() -> None:
    assert [step.number for step in arguments.steps_of(["step4", "02", "4 5"])] == [2, 4, 5]
    with pytest.raises(UsageError, match="not a step"):
        arguments.steps_of(["²"])
