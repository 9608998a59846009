"""What runs on this machine, and what is missing. Every probe is guarded, so it always prints.

Nothing but the standard library and text tables is imported at the top: the doctor has to run in a
broken installation.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass, field
from importlib import metadata
from operator import itemgetter
from typing import Any, Final

from results.render import table
from results.render.table import Column

PACKAGES: Final = (
    "numpy", "numba", "numba-cuda", "cuda-bindings", "cuda-core", "cuda-toolkit", "nvidia-nvvm",
    "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-nvjitlink",
    "nvidia-nvjitlink-cu12", "nvidia-cuda-nvdisasm", "greenlet", "platformdirs", "rich",
    "matplotlib", "gguf", "torch", "pytest", "hypothesis",
)  # fmt: skip

PTX_OF_CUDA: Final = {
    **{(12, minor): (8, min(minor, 5)) for minor in range(7)},
    **{(12, minor): (8, minor - 1) for minor in range(7, 10)},
    **{(13, minor): (9, minor) for minor in range(5)},
}
"""The newest PTX version that a driver of each CUDA version accepts (release notes of PTX)."""


@dataclass(slots=True)
class Findings:
    """What the probes found. The `no_` say why something does not work; `problems` are sentences
    that say what to do; env: as measurements record it (`results.record.schema.Environment`)."""

    python: str = f"{platform.python_version()} ({sys.executable})"
    platform: str = ""
    packages: dict[str, str | None] = field(default_factory=dict)
    tools: dict[str, str | None] = field(default_factory=dict)
    ptx: str | None = None  # that the compiler emits
    driver: dict[str, str | None] = field(default_factory=dict)
    no_simulator: str | None = None
    no_machine_code: str | None = None
    no_gpu: str | None = None
    steps: dict[int, str | None] = field(default_factory=dict)  # why a GPU does not run it
    problems: list[str] = field(default_factory=list)
    env: dict[str, Any] = field(default_factory=dict)

    @property
    def something_runs(self) -> bool:
        return bool(self.steps) and (self.no_simulator is None or self.no_gpu is None)


def doctor(_: Namespace) -> int:
    """Print what runs here; 0 if anything does, else 1."""
    found = examine()
    _print(found)
    return 0 if found.something_runs else 1


def examine() -> Findings:
    """All probes; later ones may use what earlier ones found."""
    found = Findings(platform=platform.platform())
    if sys.version_info < (3, 11):  # noqa: UP036 - an old Python is one of the findings
        found.problems.append(
            f"Python {platform.python_version()} is too old: 3.11 or later is needed"
        )
    for probe in (_packages, _tools, _simulator, _machine_code, _driver, _gpu, _env, _steps):
        try:
            probe(found)
        except Exception as error:  # whatever is broken here is a finding
            what = probe.__name__.strip("_")
            found.problems.append(f"{what} could not be examined: {_sentence(error)}")
    return found


def _sentence(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


# --- probes ---------------------------------------------------------------------------------------


def _packages(found: Findings) -> None:
    for name in PACKAGES:
        try:
            found.packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.packages[name] = None


def _tools(found: Findings) -> None:
    from steps.cli.tools import find_tool

    for name in ("make", "git", "nvidia-smi", "ncu", "compute-sanitizer"):
        found.tools[name] = find_tool(name)
    try:
        from cuda import pathfinder

        found.tools["nvdisasm"] = pathfinder.find_nvidia_binary_utility("nvdisasm")
    except Exception:  # not installed: look on PATH
        found.tools["nvdisasm"] = shutil.which("nvdisasm")


def _simulator(found: Findings) -> None:
    """Checks step 1 in it: 32 multiply-adds."""
    try:
        import greenlet  # noqa: F401

        import steps
        from reference import Problem
        from steps.checks.verify import verify
        from steps.driver.machines import Simulator

        verdict = verify(steps.find(1), "A16", Problem(1, 1, 32, "q4_0", "integer"), Simulator())
        found.no_simulator = None if verdict.ok else verdict.verdict
    except Exception as error:
        found.no_simulator = _sentence(error)


def _machine_code(found: Findings) -> None:
    """Compiles a kernel of three instructions, without a GPU."""
    try:
        from numba import cuda

        if cuda.implementation != "NVIDIA":
            found.problems.append(
                "numba.cuda is the old one inside Numba: numba-cuda is not installed, or its .pth "
                "file is not read (pip --target); run `make clean-venv setup`"
            )
        import steps.simulator  # noqa: F401 - says what else is wrong with it
        from steps.compile.compiler import machine_code

        @cuda.jit
        def probe(x):
            x[0] = 1

        code = machine_code(probe, "void(float32[::1])", "sm_90a")
        version = re.search(r"\.version (\d+\.\d+)", code.ptx)
        found.ptx = version[1] if version else None
    except Exception as error:
        found.no_machine_code = _sentence(error)


def _driver(found: Findings) -> None:
    from cuda.bindings import driver

    try:
        error, version = driver.cuDriverGetVersion()
    except Exception:  # there is no driver library
        return
    if int(error) or not version:
        return
    cuda = (version // 1000, version % 1000 // 10)
    newest = PTX_OF_CUDA.get(cuda)
    found.driver = {
        "cuda": f"{cuda[0]}.{cuda[1]}",
        "ptx": f"{newest[0]}.{newest[1]}" if newest else None,
    }
    if newest and found.ptx and tuple(map(int, found.ptx.split("."))) > newest:
        found.problems.append(
            f"the compiler emits PTX {found.ptx}; the driver (CUDA {found.driver['cuda']}) accepts "
            f"{found.driver['ptx']} at most: update the driver, or run `make clean-venv` and "
            f"`make CUDA={cuda[0]} doctor`"
        )


def _gpu(found: Findings) -> None:
    try:
        from steps.contract import why_no_gpu

        found.no_gpu = why_no_gpu()
    except Exception as error:
        found.no_gpu = _sentence(error)
        return
    if found.no_gpu and not found.driver:
        found.no_gpu = "there is no NVIDIA driver on this machine"
    if not found.no_gpu and (others := _other_processes()):
        found.problems.append(
            f"{len(others)} other processes use this GPU ({', '.join(others)}): stop them, or "
            "times will not be reproducible"
        )


def _other_processes() -> list[str]:
    """ "pid name" of every other process on the GPU, where nvidia-smi can tell."""
    command = ["nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.replace(",", "").strip() for line in done.stdout.splitlines() if line.strip()]
    return [line for line in lines if line.split()[0] != str(os.getpid())]


def _env(found: Findings) -> None:
    from results.record.environment import environment

    found.env = asdict(environment())


def _steps(found: Findings) -> None:
    import steps

    cc = None if found.no_gpu else found.env.get("cc")
    for step in steps.ladder():
        refused = step.supports(step.formats[0], step.families[-1], tuple(cc)) if cc else None
        found.steps[step.number] = found.no_gpu or refused


# --- printing -------------------------------------------------------------------------------------


def _print(found: Findings) -> None:
    for head, pairs in (("works here?", _abilities(found)), ("found", _facts(found))):
        columns = Column("what", itemgetter(0), words=True), Column(head, itemgetter(1), words=True)
        table.show(table.of_records(columns, pairs))
        print()
    for problem in found.problems:
        print(f"problem: {problem}")


def _abilities(found: Findings) -> list[tuple[str, str]]:
    """What a user may want to do, and "yes" or "no" with the reason."""

    def works(reason: str | None, more: str = "") -> str:
        return f"no: {reason}" if reason else f"yes{more}"

    refused = [why for why in found.steps.values() if why]
    count = f", {len(found.steps) - len(refused)} of {len(found.steps)} steps"
    torch = None if found.packages.get("torch") else "torch is not installed"
    emits = f": PTX {found.ptx} for sm_75 and later"
    return [
        ("run and time steps on a GPU", works(found.no_gpu, "; ".join([count, *refused]))),
        ("check steps in the simulator", works(found.no_simulator)),
        ("show PTX and machine code", works(found.no_machine_code, emits)),
        ("time cuBLAS, run models", works(found.no_gpu or torch)),
    ]


def _facts(found: Findings) -> list[tuple[str, str]]:
    """Names and versions; packages of the other CUDA are left out."""
    facts = [("python", found.python), ("platform", found.platform)]
    for name in ("gpu", "cc", "sms", "l2_bytes", "memory_bytes", "driver", "power_limit_w"):
        if value := found.env.get(name):
            told = f"{value / 2**20:.0f} MiB" if name.endswith("_bytes") else str(value)
            facts.append((name, ".".join(map(str, value)) if name == "cc" else told))
    if found.driver:
        accepts = found.driver["ptx"] or "an unknown version"
        facts += [("driver", f"CUDA {found.driver['cuda']}, accepts PTX up to {accepts}")]
    facts += [
        (name, version or "not installed")
        for name, version in found.packages.items()
        if version or not name.endswith("-cu12")
    ]
    return facts + [(name, path or "not found") for name, path in found.tools.items()]
