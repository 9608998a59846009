"""What this machine can run, and why not the rest. Every probe is guarded, so it always prints.

Only the standard library is imported at the top: a doctor must cope with a broken installation.
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
from results.render.text import Column, Line, Table, Tone

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
"""The newest PTX version that each CUDA version understands (release notes of the PTX ISA)."""


@dataclass(slots=True)
class Findings:
    """What the probes found; `problems` are sentences with a cure in them."""

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
    no_llama_cpp: str | None = None
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
    """All probes, in an order in which later ones may use what earlier ones found."""
    found = Findings(
        python=f"{platform.python_version()} ({sys.executable})", platform=platform.platform()
    )
    if sys.version_info < (3, 11):  # noqa: UP036 - a broken installation is what a doctor is for
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
        _llama_cpp,
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
    except Exception as error:  # whatever is broken here is what the user wants to read about
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
    except Exception:  # not installed: PATH is then the only place to look
        found.tools["nvdisasm"] = shutil.which("nvdisasm")


def _simulator(found: Findings) -> None:
    """Runs the golden case's step 1 in it: 32 multiply-adds."""
    try:
        import greenlet  # noqa: F401

        import steps
        from reference import Problem
        from steps.api.machines import Simulator
        from steps.checks.verify import verify

        verdict = verify(steps.find(1), "A16", Problem(1, 1, 32, "q4_0", "integer"), Simulator())
        found.no_simulator = None if verdict.ok else verdict.verdict
    except Exception as error:
        found.no_simulator = _sentence(error)


def _machine_code(found: Findings) -> None:
    """Compiles a kernel of three instructions, without a GPU."""
    try:
        from numba import cuda

        from steps.api.compile import machine_code

        if cuda.implementation != "NVIDIA":
            found.problems.append(
                "numba.cuda is Numba's old built-in one: numba-cuda is not installed, or installed "
                "where its .pth file is not read (pip --target)"
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
    except Exception:  # the library itself is not there
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
            f"the compiler emits PTX {emitted} and the driver (CUDA {found.driver['cuda']}) takes "
            f"up to {found.driver['ptx']}: update the driver, or set up again with "
            f"`make clean-venv` and `make CUDA={cuda[0]} doctor`"
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
                f"{len(others)} other processes use this GPU ({', '.join(others)}): times will not "
                "be reproducible"
            )


def _other_processes() -> list[str] | None:
    """ "pid name" of what else computes on the GPU; None where nvidia-smi cannot say."""
    import os

    command = ["nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = [line.replace(",", "").strip() for line in done.stdout.splitlines() if line.strip()]
    return [line for line in lines if line.split()[0] != str(os.getpid())]


def _llama_cpp(found: Findings) -> None:
    from results.baselines.llama_cpp import why_not

    found.no_llama_cpp = why_not()


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
    facts = [("python", found.python), ("platform", found.platform)]
    facts += [
        (name, version or "not installed")
        for name, version in found.packages.items()
        if version or not name.endswith("-cu12")
    ]
    facts += [(name, path or "not found") for name, path in found.tools.items()]
    if found.compiler:
        facts.append(
            ("emits PTX", f"{found.compiler['ptx']} for {found.compiler['architectures']}")
        )
    if found.driver:
        facts.append(
            (
                "driver takes PTX",
                f"{found.driver['ptx'] or 'unknown'} (CUDA {found.driver['cuda']})",
            )
        )
    facts += [(f"gpu {name}", _fact(name, value)) for name, value in found.gpu.items()]
    lines = tuple(Line(fact) for fact in facts)
    table.show(Table((Column("what", words=True), Column("found", words=True)), lines))
    print()
    columns = [Column("step"), Column("title", words=True)]
    columns += [Column(n, words=True) for n in ("GPU", "simulator", "machine code")]
    table.show(Table(tuple(columns), tuple(map(_step_line, found.steps))))
    print()
    reasons = (
        ("GPU", found.no_gpu),
        ("simulator", found.no_simulator),
        ("machine code", found.no_machine_code),
    )
    for name, reason in reasons:
        if reason:
            print(f"no {name}: {reason}")
    if found.no_llama_cpp:
        print(f"a bench takes llama.cpp's figures from another run: {found.no_llama_cpp}")
    for step in found.steps:
        if step["gpu"] and step["gpu"] != found.no_gpu:
            print(step["gpu"])
    for problem in found.problems:
        print(f"problem: {problem}")


def _fact(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return f"{value / 2**20:.0f} MiB"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return str(value)


def _step_line(step: dict[str, Any]) -> Line:
    places = [step["gpu"], step["simulator"], step["machine_code"]]
    tone: Tone = "bad" if all(places) else ""
    return Line((str(step["number"]), step["title"], *("no" if p else "yes" for p in places)), tone)
