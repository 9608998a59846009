"""The command line of what is measured of torch into a file of its own, beside a GPU's run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from qformats import WEIGHT_FORMATS
from results.record import store
from results.record.environment import environment, finished


class Wrong(Exception):
    """What was measured is wrong, in a sentence: nothing of it is recorded."""


def main(
    kind: Any,
    packages: Sequence[str],
    measure: Callable[[str], dict[str, Any]],
    arguments: Sequence[str] | None = None,
) -> int:
    """Measure a format on this GPU and, with --json, write it; 1 if it is wrong, 2 where `packages`
    (torch first) or a GPU are missing.

    kind: the record's class, with `NAME`. measure: format -> all of its fields but `env`.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--format", choices=WEIGHT_FORMATS, default="q4_0")
    told = f"write the results into results/<gpu>/{kind.NAME}"
    parser.add_argument("--json", action="store_true", help=told)
    options = parser.parse_args(arguments)
    try:
        torch, *_ = map(import_module, packages)
    except ModuleNotFoundError as missing:
        print(f"{missing.name} is not installed: pip install {' '.join(packages)}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("torch finds no CUDA GPU: nothing is measured", file=sys.stderr)
        return 2
    env = environment()
    try:
        found = measure(options.format)
    except Wrong as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        path = store.path_for(env, name=kind.NAME)
        print(store.write(kind(env=finished(env), **found), path))
    return 0
