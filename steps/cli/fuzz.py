"""The command `fuzz`: random products until the time is up, or one that is named."""

from __future__ import annotations

import random
import time
from argparse import Namespace
from collections.abc import Iterable
from typing import Final

from steps.checks import fuzz as fuzzer
from steps.checks.fuzz_cases import FuzzCase, cases
from steps.cli.arguments import machines, steps_of

ALIKE: Final = 64
"""Cases of a step, format and dtypes that follow each other on a GPU, which compiles for each."""


def fuzz(args: Namespace) -> int:
    """1 if anything is wrong; each wrong case is told with the line that repeats it."""
    steps = steps_of(args.steps)
    name, machine, why_not = machines("auto")
    cc = None if why_not else machine(0).cc
    seed = random.randrange(10**6) if args.seed is None else args.seed
    some: Iterable[FuzzCase]
    if args.case is not None:
        some, seconds, what = [FuzzCase.parse(args.case)], 0, "case"
    else:
        some, seconds, what = cases(seed, steps, cc, ALIKE if cc else 1), args.seconds, "products"
    wrong = 0

    def report(case: FuzzCase, found: list[str]) -> None:
        nonlocal wrong
        wrong += 1
        sentences = "\n  ".join(found)
        print(f'{case}\n  {sentences}\n  again: make fuzz CASE="{case}"', flush=True)

    start = time.monotonic()
    count = fuzzer.fuzz(some, machine, seconds, report)
    took = time.monotonic() - start
    seeded = "" if args.case is not None else f", SEED={seed}"
    print(f"{count} {what} on the {name} in {took:.0f} s{seeded}: {wrong or 'none'} wrong")
    return 1 if wrong else 0
