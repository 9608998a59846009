"""Every mutation of a step's synchronization is noticed on a CPU, or listed with the reason.

See `tests.steps.mutations`. `make test` tries one of each kind, and one of each step that none of
these is of, with QUICK=1 the latter, with ALL=1 all of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest

import steps
from tests.steps import mutations
from tests.steps.mutations import Outcome, Site


def labels_and_parts() -> Iterator[pytest.param]:
    """(label, part). All parts go to one process, which remembers the cases."""
    for label in reversed(mutations.SUBJECTS):  # the longest first
        group = pytest.mark.xdist_group(f"mutations-{label}")
        for part, marks in PARTS.items():
            yield pytest.param(label, part, id=f"{label}-{part}", marks=(group, *marks))


PARTS = {"one": (), "kinds": (pytest.mark.slow,), "rest": (pytest.mark.every,)}


@cache
def part_of(site: Site, label: str) -> str:
    """One of each kind and instruction, from those that have it in turn; where a label has none of
    these, its first, which is noticed soon."""
    own = mutations.own_sites(label)
    kinds = {
        (one.called, one.kind): one
        for one in reversed(own)
        if (label, one.called, one.kind) in one_of_each_kind()
    }
    if site in kinds.values():
        return "kinds"
    return "one" if site == own[0] and not kinds else "rest"


@cache
def one_of_each_kind() -> frozenset[tuple[str, str, str]]:
    """(label, instruction, kind)"""
    having: dict[tuple[str, str], list[str]] = {}
    for label in mutations.SUBJECTS:
        for what in dict.fromkeys((one.called, one.kind) for one in mutations.own_sites(label)):
            having.setdefault(what, []).append(label)
    kinds = enumerate(having.items())
    return frozenset((labels[i % len(labels)], *what) for i, (what, labels) in kinds)


@pytest.mark.parametrize(("label", "part"), list(labels_and_parts()))
def test_every_mutation_is_noticed(label: str, part: str) -> None:
    chosen = [site for site in mutations.own_sites(label) if part_of(site, label) == part]
    found = [mutations.problem_with(mutations.tried(site, label)) for site in chosen]
    assert not any(found), "\n".join(filter(None, found))


def test_every_equivalent_mutation_is_still_there() -> None:
    assert mutations.stale() == []


def test_the_table_in_the_worklog_counts_them() -> None:
    """`python -m tests.steps.mutations` with the labels of what has changed mends it."""
    listed = mutations.rows_of(mutations.TABLE.read_text(encoding="utf-8"))
    assert {label: (total, by[-1]) for label, (total, *by) in listed.items()} == {
        label: (len(sites), sum(site.key in mutations.EQUIVALENT for site in sites))
        for label in mutations.SUBJECTS
        if (sites := mutations.own_sites(label))
    }


@pytest.mark.parametrize("number", [step.number for step in steps.ladder() if step.number > 1])
def test_every_step_with_shared_memory_has_some(number: int) -> None:
    """The engine finds them without being told; in a step that it does not understand, none."""
    step = steps.find(number)
    text = (mutations.ROOT / "steps" / f"{step.name}.py").read_text(encoding="utf-8")
    own = {site.path.stem for site in mutations.device_sites(f"step{number:02d}")}
    assert "cuda.shared.array" not in text or step.name in own


# --- the engine itself ----------------------------------------------------------------------------


def a_site() -> Site:
    return next(site for site in mutations.own_sites("step07") if site.called == "syncthreads")


@pytest.mark.slow
def test_a_change_that_changes_nothing_is_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What notices all mutations may notice anything."""
    site = a_site()
    monkeypatch.setattr(mutations, "changed", lambda site: mutations.tree_of(site.path))
    assert mutations.tried(site, "step07") == Outcome(site, "step07")
    assert mutations.problem_with(Outcome(site, "step07")) == f"nothing notices {site}"


def test_what_is_listed_and_noticed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    site = a_site()
    monkeypatch.setattr(
        mutations, "EQUIVALENT", {site.key: "none", ("no", "such", "site", 1, ""): ""}
    )
    found = mutations.tried(site, "step07")
    assert found.by == "race"
    assert "is in EQUIVALENT and is noticed: race" in (mutations.problem_with(found) or "")
    assert mutations.problem_with(Outcome(site, "step07")) is None
    assert mutations.stale() == [("no", "such", "site", 1, "")]


def test_a_mutant_that_is_no_program_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    site = a_site()
    text = ast.unparse(mutations.tree_of(site.path)).replace("cuda.syncthreads()", "no_such_name()")
    monkeypatch.setattr(mutations, "changed", lambda _: ast.parse(text))
    with pytest.raises(AssertionError, match=r"NameError: .*no_such_name"):
        mutations.tried(site, "step07")


SOURCE = """
@cuda.jit(device=True)
def put(ring, stage):
    mbarrier_arrive(ring, empty + 8 * stage)

def factory():
    wait_full, wait = ring.wait_full, wgmma_wait(1)
    more = setmaxnreg_inc(232)

    @cuda.jit
    def kernel(memory, acc, parity, stage):
        more()
        mbarrier_init(memory, 0, consumers)
        mbarrier_wait(memory, 8, parity ^ 1)
        wait_full(memory, stage, parity)
        bulk_copy(memory, stage * a_bytes, w, 0, 16, memory, full(stage))
        acc, other = wait(acc), x.syncthreads()
        cuda.syncthreads()
        stage = int32(stage + stage_bytes)
        size = 2 * w_bytes + N * stride

def host():
    cuda.syncthreads()
"""


def test_sites_and_their_mutations() -> None:
    """Of device code alone; names that a factory gave, too."""
    tree = ast.parse(SOURCE)
    found = mutations.sites_in(tree, mutations.ROOT / "steps" / "source.py")
    before = ast.unparse(tree).splitlines()
    told = []
    for site in found:
        after = ast.unparse(mutations.changed_in(tree, site)).splitlines()
        (line,) = [one for one, was in zip(after, before, strict=True) if one != was]
        told.append((site.function, site.kind, line.strip()))
    copy = "bulk_copy(memory, {} * a_bytes, w, 0, 16, memory, full({}))"
    assert told == [
        ("put", "left out", "ring"),
        ("put", "other stage", "mbarrier_arrive(ring, empty + 8 * (stage ^ 1))"),
        ("factory", "one group later", "wait_full, wait = (ring.wait_full, wgmma_wait(1 + 1))"),
        ("kernel", "left out", "None"),
        ("kernel", "left out", "memory"),
        ("kernel", "one arrival less", "mbarrier_init(memory, 0, consumers - 1)"),
        ("kernel", "one arrival more", "mbarrier_init(memory, 0, consumers + 1)"),
        ("kernel", "left out", "memory"),
        ("kernel", "other parity", "mbarrier_wait(memory, 8, parity)"),
        ("kernel", "left out", "memory"),
        ("kernel", "other parity", "wait_full(memory, stage, parity ^ 1)"),
        ("kernel", "other stage", "wait_full(memory, stage ^ 1, parity)"),
        ("kernel", "other stage", copy.format("(stage ^ 1)", "stage")),
        ("kernel", "other stage", copy.format("stage", "stage ^ 1")),
        ("kernel", "left out", "acc, other = (acc, x.syncthreads())"),
        ("kernel", "left out", "None"),
        ("kernel", "same stage", "stage = int32(stage)"),
    ]
