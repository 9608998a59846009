"""The command `fuzz`: random products until the time is up or there are enough, or one by its line.

On GPUs several processes multiply (`steps.checks.fuzz_workers`), in the simulator this one. Each
wrong case is told with the line that repeats it.
"""

from __future__ import annotations

import json
import os
import random
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from results.render import table
from steps.checks import fuzz as fuzzer
from steps.checks import fuzz_cases, fuzz_experts
from steps.checks.fuzz_cases import FuzzCase
from steps.checks.fuzz_experts import ExpertsCase
from steps.checks.fuzz_workers import EXPERTS, Tell, Totals, fuzz_on_gpus, gpus_of
from steps.cli.arguments import MachineOf, machines, steps_of
from steps.registry import kernel_of, ladder

MOST: Final = 50  # wrong cases that are printed; of more only their number is told


def fuzz(args: Namespace) -> int:
    """1 if any product is wrong."""
    numbers = [step.number for step in steps_of(args.steps)]
    name, machine, why_not = machines("auto")
    seed = random.randrange(10**6) if args.seed is None else args.seed
    wrong: list[tuple[str, list[str]]] = []
    cc = None if why_not else machine(0).cc
    jobs = args.jobs or os.cpu_count() or 1
    many = cc is not None and args.case is None
    gpus = gpus_of(cc)[:jobs] if cc is not None and many else []
    start = time.monotonic()
    with _telling(args, wrong) as (tell, progress):

        def report(totals: Totals) -> None:
            found = f"{totals.wrong or 'none'} wrong"
            what = f"s: {totals.products} products of {len(totals.works)} works, {found}"
            progress(what, min(args.seconds, round(time.monotonic() - start)))

        if cc is None or args.case is not None:
            named = None if args.case is None else [*map(_case, args.case)]
            totals = _here(numbers, seed, args.seconds, args.count, machine, named, cc, tell)
        else:
            many_of = (numbers, seed, args.seconds, args.count, jobs, gpus, cc)
            totals = fuzz_on_gpus(*many_of, tell, report)
    took = time.monotonic() - start
    if args.json:
        facts = {"machine": name, "products": totals.products, "seconds": round(took, 1)}
        facts |= {"seed": seed, "wrong": totals.wrong, "processes": jobs if many else 1}
        facts |= {"gpus": len(gpus), "works": len(totals.works)}
        print(json.dumps({**facts, "cases": dict(wrong)}, indent=1))
        return 1 if totals.wrong else 0
    if totals.wrong > MOST:
        print(f"... and {totals.wrong - MOST} more")
    of = f" of {len(totals.works)} works by {jobs} processes" if many else ""
    what = "products" if args.case is None else "case" if len(args.case) == 1 else "cases"
    where = f"{len(gpus)} of the {name}" if len(gpus) > 1 else f"the {name}"
    seeded = "" if args.case is not None else f", SEED={seed}"
    print(
        f"{totals.products} {what}{of} on {where} in {took:.0f} s{seeded}: "
        f"{totals.wrong or 'none'} wrong"
    )
    return 1 if totals.wrong else 0


@contextmanager
def _telling(
    args: Namespace, wrong: list[tuple[str, list[str]]]
) -> Iterator[tuple[Tell, table.Progress]]:
    """(what prints a wrong case and keeps it, a line of progress)"""
    with table.progress(args.seconds) as progress:

        def tell(line: str, sentences: list[str]) -> None:
            wrong.append((line, sentences))
            if len(wrong) <= MOST and not args.json:
                progress.clear()
                said = "\n  ".join(sentences)
                print(f'{line}\n  {said}\n  again: make fuzz CASE="{line}"', flush=True)

        yield tell, progress


def _here(
    numbers: list[int],
    seed: int,
    seconds: float,
    count: int | None,
    machine: MachineOf,
    named: Sequence[FuzzCase | ExpertsCase] | None,
    cc: tuple[int, int] | None,
    tell: Tell,
) -> Totals:
    """The cases that are named, or cases in the simulator, by this process."""
    totals, start = Totals(), time.monotonic()
    for case in named or _simulated(numbers, seed, cc):
        found, lost = fuzzer.judged(case, machine(case.order))
        totals.products += 1
        if found:
            totals.wrong += 1
            tell(str(case), found)
        if lost or time.monotonic() - start >= seconds or totals.products == count:
            break
    return totals


def _case(line: str) -> FuzzCase | ExpertsCase:
    return (ExpertsCase if line.startswith("experts=") else FuzzCase).parse(line)


def _simulated(numbers: list[int], seed: int, cc: tuple[int, int] | None) -> Iterator[Any]:
    """Cases without end; of experts, too, where no steps were named."""
    rng, with_experts = np.random.default_rng(seed), len(numbers) == len(ladder())
    for i, case in enumerate(fuzz_cases.cases(seed, [*map(kernel_of, numbers)], cc)):
        yield case
        if with_experts and i % EXPERTS == EXPERTS - 1:
            yield from fuzz_experts.sharing(rng, True, 1)
