"""What runs on this machine, and what is missing. Every probe is guarded, so it always prints.

Nothing but the standard library and text tables is imported at the top: the doctor has to run in a
broken installation.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any, Final

from results.render import text as table
from results.render.text import Column, Line, Table

PACKAGES: Final = (
    "numpy",
    "numba",
    "numba-cuda",
    "cuda-bindings",
    "cuda-core",
    "cuda-toolkit",
    "nvidia-nvvm",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-nvjitlink",
    "nvidia-nvjitlink-cu12",
    "nvidia-cuda-nvdisasm",
    "greenlet",
    "platformdirs",
    "rich",
    "matplotlib",
    "gguf",
    "torch",
    "llama-cpp-python",
    "pytest",
    "hypothesis",
)

PTX_OF_CUDA: Final = {
    (12, 0): (8, 0),
    (12, 1): (8, 1),
    (12, 2): (8, 2),
    (12, 3): (8, 3),
    (12, 4): (8, 4),
    (12, 5): (8, 5),
    (12, 6): (8, 5),
    (12, 7): (8, 6),
    (12, 8): (8, 7),
    (12, 9): (8, 8),
    (13, 0): (9, 0),
    (13, 1): (9, 1),
    (13, 2): (9, 2),
    (13, 3): (9, 3),
    (13, 4): (9, 4),
}
"""The newest PTX version that a driver of each CUDA version accepts (release notes of PTX)."""


@dataclass(slots=True)
class Findings:
    """What the probes found; `problems` are sentences that say what to do."""

    python: str = ""
    platform: str = ""
    packages: dict[str, str | None] = field(default_factory=dict)
    tools: dict[str, str | None] = field(default_factory=dict)
    compiler: dict[str, Any] = field(default_factory=dict)
    driver: dict[str, Any] = field(default_factory=dict)
    gpu: dict[str, Any] = field(default_factory=dict)
    no_simulator: str | None = None
    no_machine_code: str | None = None
    no_gpu: str | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    env: dict[str, Any] = field(default_factory=dict)

    @property
    def something_runs(self) -> bool:
        return bool(self.steps) and (self.no_simulator is None or self.no_gpu is None)


def doctor(args: Namespace) -> int:
    """Print what runs here; 0 if anything does, else 1."""
    found = examine()
    if args.json:
        print(json.dumps(asdict(found) | {"something_runs": found.something_runs}, indent=1))
    else:
        _print(found)
    return 0 if found.something_runs else 1


def examine() -> Findings:
    """All probes; later ones may use what earlier ones found."""
    found = Findings(
        python=f"{platform.python_version()} ({sys.executable})", platform=platform.platform()
    )
    if sys.version_info < (3, 11):  # noqa: UP036 - an old Python is one of the findings
        found.problems.append(
            f"Python {platform.python_version()} is too old: 3.11 or later is needed"
        )
    for probe in (
        _packages,
        _tools,
        _simulator,
        _machine_code,
        _driver,
        _gpu,
        _steps,
        _env,
    ):
        reason = _guarded(probe, found)
        if reason:
            found.problems.append(f"{probe.__name__.strip('_')} could not be examined: {reason}")
    return found


def _guarded(probe: Callable[[Findings], None], found: Findings) -> str | None:
    try:
        probe(found)
    except Exception as error:  # whatever is broken here is a finding
        return _sentence(error)
    return None


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

        from steps.compile.compiler import machine_code

        if cuda.implementation != "NVIDIA":
            found.problems.append(
                "numba.cuda is the old one inside Numba: numba-cuda is not installed, or its .pth "
                "file is not read (pip --target); run `make clean-venv setup`"
            )

        @cuda.jit
        def probe(x):
            x[0] = 1

        code = machine_code(probe, "void(float32[::1])", "sm_90a")
        version = re.search(r"\.version (\d+)\.(\d+)", code.ptx)
        found.compiler = {
            "implementation": cuda.implementation,
            "ptx": f"{version[1]}.{version[2]}" if version else None,
            "architectures": "sm_75 and later",
        }
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
    emitted = found.compiler.get("ptx")
    if newest and emitted and tuple(map(int, emitted.split("."))) > newest:
        found.problems.append(
            f"the compiler emits PTX {emitted}; the driver (CUDA {found.driver['cuda']}) accepts "
            f"{found.driver['ptx']} at most: update the driver, or run `make clean-venv` and "
            f"`make CUDA={cuda[0]} doctor`"
        )


def _gpu(found: Findings) -> None:
    try:
        from steps.contract import why_no_gpu

        found.no_gpu = why_no_gpu()
    except Exception as error:
        found.no_gpu = _sentence(error)
    if found.no_gpu:
        if not found.driver:
            found.no_gpu = "there is no NVIDIA driver on this machine"
        return
    from numba import cuda

    device = cuda.get_current_device()
    name = device.name.decode() if isinstance(device.name, bytes) else str(device.name)
    memory = cuda.current_context().get_memory_info()
    found.gpu = {
        "name": name,
        "cc": "{}.{}".format(*device.compute_capability),
        "sms": int(device.MULTIPROCESSOR_COUNT),
        "l2_bytes": int(device.L2_CACHE_SIZE),
        "memory_free_bytes": int(memory.free),
        "memory_total_bytes": int(memory.total),
    }
    asked = {
        "driver_version": "driver",
        "clocks.sm": "sm_mhz",
        "clocks.max.sm": "sm_max_mhz",
        "power.limit": "power_limit_w",
        "power.draw": "power_draw_w",
        "ecc.mode.current": "ecc",
        "clocks_throttle_reasons.active": "throttle",
    }
    from results.record.environment import nvidia_smi

    found.gpu |= {asked[key]: value for key, value in nvidia_smi(tuple(asked)).items()}
    others = _other_processes()
    if others is not None:
        found.gpu["other_processes"] = others
        if others:
            found.problems.append(
                f"{len(others)} other processes use this GPU ({', '.join(others)}): stop them, or "
                "times will not be reproducible"
            )


def _other_processes() -> list[str] | None:
    """ "pid name" of every other process on the GPU; None where nvidia-smi cannot tell."""
    import os

    command = ["nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = [line.replace(",", "").strip() for line in done.stdout.splitlines() if line.strip()]
    return [line for line in lines if line.split()[0] != str(os.getpid())]


def _steps(found: Findings) -> None:
    import steps

    major, minor = map(int, found.gpu["cc"].split(".")) if found.gpu else (0, 0)
    cc = (major, minor) if found.gpu else None
    for step in steps.ladder():
        unsupported = step.supports(step.formats[0], step.families[-1], cc) if cc else None
        found.steps.append(
            {
                "number": step.number,
                "title": step.title,
                "gpu": found.no_gpu or unsupported,
                "simulator": found.no_simulator,
                "machine_code": found.no_machine_code,
            }
        )


def _env(found: Findings) -> None:
    from results.record.environment import environment

    found.env = asdict(environment())


# --- printing -------------------------------------------------------------------------------------


def _print(found: Findings) -> None:
    lines = tuple(Line(pair) for pair in _abilities(found))
    table.show(Table((Column("what", words=True), Column("works here?", words=True)), lines))
    print()
    lines = tuple(Line(pair) for pair in _facts(found))
    table.show(Table((Column("what", words=True), Column("found", words=True)), lines))
    if found.problems:
        print()
    for problem in found.problems:
        print(f"problem: {problem}")


def _abilities(found: Findings) -> list[tuple[str, str]]:
    """What a user may want to do, and "yes" or "no" with the reason."""
    compiler = found.compiler
    emits = f": PTX {compiler.get('ptx')} for {compiler.get('architectures')}" if compiler else ""
    torch = None if found.packages.get("torch") else "torch is not installed"
    return [
        ("run and time steps on a GPU", _on_the_gpu(found)),
        ("check steps in the simulator", _yes_or_no(found.no_simulator)),
        ("show PTX and machine code", _yes_or_no(found.no_machine_code) + emits),
        ("time cuBLAS", _yes_or_no(found.no_gpu or torch)),
    ]


def _yes_or_no(reason: str | None) -> str:
    return f"no: {reason}" if reason else "yes"


def _on_the_gpu(found: Findings) -> str:
    """Every step, or which steps do not run and why."""
    if found.no_gpu:
        return f"no: {found.no_gpu}"
    refused = [step["gpu"] for step in found.steps if step["gpu"]]
    count = len(found.steps) - len(refused)
    return f"yes, {count} of {len(found.steps)} steps" + "".join(f"; {each}" for each in refused)


def _facts(found: Findings) -> list[tuple[str, str]]:
    """Names and versions; packages of the other CUDA are left out."""
    facts = [("python", found.python), ("platform", found.platform)]
    facts += [(f"GPU {name}", _fact(name, value)) for name, value in found.gpu.items()]
    if found.driver:
        accepts = found.driver["ptx"] or "an unknown version"
        facts += [("driver", f"CUDA {found.driver['cuda']}, accepts PTX up to {accepts}")]
    facts += [
        (name, version or "not installed")
        for name, version in found.packages.items()
        if version or not name.endswith("-cu12")
    ]
    return facts + [(name, path or "not found") for name, path in found.tools.items()]


def _fact(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return f"{value / 2**20:.0f} MiB"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return str(value)
