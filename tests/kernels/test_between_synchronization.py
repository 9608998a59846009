"""Each barrier, fence and wait of a kernel between products, left out, is noticed on a CPU; and the
order of launches in a chain."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from steps.driver.machines import Simulator
from steps.kernels.between import (
    add_and_norm,
    argmax,
    attention,
    deferred_norm,
    rotary,
    router,
    swiglu,
)
from steps.simulator.errors import Race, SimulatorError
from tests.kernels import between_problems as problems
from tests.kernels.between_problems import (
    Heads,
    Matrix,
    argmax_problem,
    attention_problem,
    choice_problem,
    norm_problem,
    residual_problem,
    rotary_problem,
    router_problem,
    swiglu_problem,
)
from tests.steps.mutations import Site, changed, sites

MODULES = {
    "add_and_norm": add_and_norm,
    "argmax": argmax,
    "attention": attention,
    "deferred_norm": deferred_norm,
    "rotary": rotary,
    "router": router,
    "swiglu": swiglu,
}
LOGITS = np.random.default_rng(0).standard_normal((2, 150)).astype(np.float32)
MAKE = {
    "add_and_norm": partial(norm_problem, 2, 264, "float16", "float16"),
    "attention": partial(attention_problem, Heads(1, 2, 1, 64, 512, 200)),
    "attention, split": partial(attention_problem, Heads(1, 2, 1, 64, 512, 400)),
    "attention, shown": partial(
        attention_problem, Heads(1, 2, 1, 64, 512, 200), of_out="float16", shown=True
    ),
    "attention, shown and split": partial(
        attention_problem, Heads(1, 2, 1, 64, 512, 400), of_out="float16", shown=True
    ),
    "attention, polled": partial(
        attention_problem, Heads(1, 2, 1, 64, 512, 200), of_out="float16", polled=True
    ),
    "attention, polled and split": partial(
        attention_problem, Heads(1, 2, 1, 64, 512, 400), of_out="float16", polled=True
    ),
    "deferred_norm": partial(residual_problem, Matrix(5, 40, 96, "q4_0")),
    "argmax": partial(argmax_problem, 2, 9000),
    "rotary": partial(rotary_problem, Heads(1, 2, 1, 64, 8, 0), 3),
    "router": partial(router_problem, 2, 264, 40, 3),
    "router, choice": partial(choice_problem, LOGITS, 3),
    "swiglu": partial(swiglu_problem, 1, 40, "float16", "float16"),
}
UNNOTICED = {
    "attention:griddepcontrol_wait():3:left out": "who waits for this launch has to have waited "
    "for those before it, which the simulator takes for granted"
}


@dataclass(frozen=True)
class Mutation:
    name: str
    site: Site

    def __str__(self) -> str:
        return f"{self.name}:{self.site.text}:{self.site.turn}:{self.site.kind}"


def mutations() -> Iterator[Mutation]:
    for name, module in MODULES.items():
        for site in sites(Path(str(module.__file__))):
            yield Mutation(name, site)


@contextmanager
def in_place_of(monkeypatch: pytest.MonkeyPatch, name: str, tree: ast.Module) -> Iterator[None]:
    """Problems use the module of this tree."""
    original = MODULES[name]
    module = ModuleType(original.__name__)
    module.__file__ = original.__file__
    exec(compile(tree, str(original.__file__), "exec"), module.__dict__)
    with monkeypatch.context() as patch:
        patch.setattr(problems, name, module)
        yield


def noticed(name: str, order: int) -> bool:
    """Two launches right behind each other, and a check of what they leave, but where the second
    adds once more."""
    rounds = 1 if name == "deferred_norm" else 2
    for case, make in MAKE.items():
        if case.split(",")[0] == name:
            try:
                make().run(Simulator(order), rounds=rounds, verify=name != "add_and_norm")
            except (SimulatorError, AssertionError):
                return True
    return False


def test_there_are_mutations_of_each_kernel() -> None:
    kinds = {(one.name, one.site.called) for one in mutations()}
    launched = MODULES.keys() - {"deferred_norm"}  # whose kernel is step 18's
    assert {(name, "griddepcontrol_wait") for name in launched} <= kinds
    assert {("deferred_norm", "syncthreads")} <= kinds
    assert {("add_and_norm", "syncthreads"), ("attention", "syncthreads")} <= kinds
    assert ("attention", "fence") in kinds


@pytest.mark.parametrize("mutation", list(mutations()), ids=str)
def test_every_mutation_is_noticed(mutation: Mutation, monkeypatch: Any) -> None:
    with in_place_of(monkeypatch, mutation.name, changed(mutation.site)):
        found = any(noticed(mutation.name, order) for order in (0, -1, 1))
    assert found == (str(mutation) not in UNNOTICED)


@pytest.mark.parametrize("name", MODULES)
def test_nothing_is_noticed_of_the_kernels_as_they_are(name: str, monkeypatch: Any) -> None:
    tree = ast.parse(Path(str(MODULES[name].__file__)).read_text(encoding="utf-8"))
    with in_place_of(monkeypatch, name, tree):
        assert not noticed(name, -1)


def test_a_load_above_the_wait_is_found() -> None:
    """The weight of a norm is loaded there: it must not be what the launch before stores."""
    weight, x = np.ones(64, np.float32), np.zeros((1, 64), np.float32)
    h, machine = np.ones((1, 64), np.float32), Simulator()
    machine.follow(weight)
    with pytest.raises(Race, match="a load of byte 0 of weight"):
        machine.run(add_and_norm.launch(h, None, weight, 1e-5, x))


def test_a_chain_of_kernels_reads_what_those_before_have_left() -> None:
    """Residual, norm and gate one behind the other, as in a decoder, all of them overlapping."""
    rng, machine = np.random.default_rng(0), Simulator(1)
    h, y = rng.standard_normal((2, 64)).astype(np.float32), rng.standard_normal((2, 64), np.float32)
    weight, x, z = np.ones(64, np.float32), np.zeros((2, 64), np.float32), np.zeros((2, 32), "f4")
    before = h.copy()
    for _ in range(2):
        machine.run(add_and_norm.launch(h, y, weight, 1e-5, x))
        machine.run(swiglu.launch(x, z))
    wanted = (before + y + y).astype(np.float64)
    wanted /= np.sqrt((wanted**2).mean(-1, keepdims=True) + 1e-5)
    gate, up = np.split(wanted, 2, -1)
    np.testing.assert_allclose(z, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6)
