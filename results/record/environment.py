"""The machine a run was made on: GPU, driver, software, commit and command.

Where the measuring machine has no `.git`, the commit is taken from the environment variable
LADDER_GIT_SHA, for example `LADDER_GIT_SHA=$(git describe --always --dirty --exclude='*')`; a
trailing `-dirty` means what git means by it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from results.record import ROOT
from results.record.schema import Clocks, Environment, Git, Limits

GIT_SHA_VARIABLE: Final = "LADDER_GIT_SHA"

_SMI_FIELDS: Final = (
    "driver_version",
    "power.limit",
    "power.draw",
    "clocks.sm",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
)


def nvidia_smi(
    query: tuple[str, ...] = _SMI_FIELDS,
    device: str = "0",
    run: Callable[..., Any] = subprocess.run,
) -> dict[str, str]:
    """Fields of one GPU as nvidia-smi prints them; those it does not know are absent."""
    command = ["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader,nounits"]
    try:
        done = run(
            [*command, f"--id={device}"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().split("\n")[0].split(",")]
    if len(values) != len(query):
        return {}
    return {k: v for k, v in zip(query, values, strict=True) if v and not v.startswith("[")}


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_state(root: Path = ROOT, environ: Mapping[str, str] | None = None) -> Git:
    """The commit measured: LADDER_GIT_SHA where it is set, else git's answer, else nulls."""
    given = (os.environ if environ is None else environ).get(GIT_SHA_VARIABLE)
    if given:
        return Git(sha=given.removesuffix("-dirty"), dirty=given.endswith("-dirty"))
    if not (root / ".git").exists():  # installed: git would answer for a project around it
        return Git()

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout.strip()

    try:
        # what a bench writes is no change of what it measures
        changed = git("status", "--short", "--", ".", ":(exclude)results/*/*.json")
        return Git(sha=git("rev-parse", "--short=8", "HEAD"), dirty=bool(changed))
    except (OSError, subprocess.SubprocessError):
        return Git()


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def command_line() -> str:
    """How this process was called, of a path from the root its name alone: where a file lay on the
    machine that measured is nobody else's business."""
    return shlex.join(re.sub(r"^(--[\w-]+=)?/.*/", r"\1", one) for one in sys.orig_argv)


def environment(command: str | None = None) -> Environment:
    """This machine before a run. Never raises: a part that cannot be asked is null."""
    device = _device_facts()
    smi = nvidia_smi(device=str(device.pop("pci_bus_id", None) or "0"))
    return Environment(
        **device,
        driver=smi.get("driver_version"),
        cuda=_version("nvidia-nvvm") or _version("nvidia-cuda-nvcc-cu12") or _runtime_version(),
        numba=_version("numba"),
        numba_cuda=_version("numba-cuda"),
        numpy=_version("numpy"),
        python=platform.python_version(),
        power_limit_w=_number(smi.get("power.limit")),
        clocks_mhz=Clocks(
            before=_number(smi.get("clocks.sm")), max=_number(smi.get("clocks.max.sm"))
        ),
        git=git_state(),
        command=command if command is not None else command_line(),
        utc=utc_now(),
    )


def finished(env: Environment, limits: Limits | None = None) -> Environment:
    """The environment after the run: clocks and throttle reasons now, and the measured limits."""
    smi = nvidia_smi(device=str(_device_facts().get("pci_bus_id") or "0"))
    limits = limits or env.limits
    return replace(
        env,
        clocks_mhz=replace(env.clocks_mhz, after=_number(smi.get("clocks.sm"))),
        power_draw_w=_number(smi.get("power.draw")),
        throttle=smi.get("clocks_throttle_reasons.active"),
        limits=limits,
        copy_tbps=limits.copy_tbps,
    )


def _device_facts() -> dict[str, Any]:
    """What the CUDA driver says of the current GPU; empty without one."""
    with contextlib.suppress(Exception):  # no driver, no GPU, no numba: nothing is known then
        from numba import cuda

        device = cuda.get_current_device()
        name = device.name.decode() if isinstance(device.name, bytes) else str(device.name)
        facts: dict[str, Any] = {
            "gpu": name,
            "cc": tuple(device.compute_capability),
            "sms": int(device.MULTIPROCESSOR_COUNT),
            "l2_bytes": int(device.L2_CACHE_SIZE),
        }
        with contextlib.suppress(Exception):
            facts["memory_bytes"] = int(cuda.current_context().get_memory_info().total)
        with contextlib.suppress(Exception):
            from cuda.core import Device

            facts["pci_bus_id"] = Device(device.id).pci_bus_id
        return facts
    return {}


def _runtime_version() -> str | None:
    with contextlib.suppress(Exception):
        from numba import cuda

        return ".".join(map(str, cuda.runtime.get_version()))
    return None
