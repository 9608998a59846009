"""The float64 products of a machine against those of NumPy: the fuzzer's judge, judged."""

from __future__ import annotations

import numpy as np
import pytest

from qformats import FORMATS
from reference import Q81, Bfloats, Halves, Problem, Tokens
from reference.bfloat16 import rounded_to_bfloat16
from steps.checks.float64 import Answers, MachineProducts, Products, products_launch
from steps.compile.compiler import machine_code, signature_of
from steps.driver.machines import Gpu, Simulator

KINDS = (None, Halves, Bfloats, Q81, Tokens)


def _operands(kind: type | None, a: np.ndarray) -> tuple:
    if kind is None:
        return None, a
    if kind is Bfloats:
        a = rounded_to_bfloat16(a)
    return kind.of_values(a), a


def _same(found: Answers, right: Answers, k: int) -> None:
    for name, one, other in zip(Answers._fields, found, right, strict=True):
        assert one.dtype == np.float64
        scale = right.energy if name == "energy" else np.maximum(right.size, right.most)
        assert (np.abs(one - other) <= 2 * k * 2.0**-53 * scale).all(), name


FORMAT_OF = {None: "q5_1", Halves: "q4_0", Bfloats: "q5_1", Q81: "q4_0", Tokens: "q6_k"}
"""Each kind of activations in one format; a K of 256 has several stages."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=() if FORMAT_OF[kind] == name else pytest.mark.every)
        for kind in KINDS
        for name in ("q4_0", "q5_1", "q6_k")
    ],
)
def test_a_machine_multiplies_as_numpy_does(kind: type | None, name: str) -> None:
    k = FORMATS[name].elements
    problem = Problem(3, 18, k, name, seed=5)
    used, a = _operands(kind, problem.a)
    found = MachineProducts(problem.blocks, Simulator()).answers(used, a)
    right = Products(problem.blocks).answers(used, a)
    _same(found, right, k)
    assert (found.size > 0).all()
    assert np.allclose(
        found.energy, a.astype(float) ** 2 @ problem.w.astype(float).T ** 2, rtol=0.5
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q4_1", "q4_k"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: getattr(kind, "__name__", "float32"))
def test_a_gpu_multiplies_as_numpy_does(kind: type | None, name: str) -> None:
    problem = Problem(45, 130, 2048, name, seed=6)
    used, a = _operands(kind, problem.a)
    found = MachineProducts(problem.blocks, Gpu()).answers(used, a)
    _same(found, Products(problem.blocks).answers(used, a), 2048)


def test_it_compiles_for_a_gpu() -> None:
    some = np.zeros((2, 2, 2))
    launch = products_launch(some[0], some, some)
    code = machine_code(launch.kernel, signature_of(launch.args))
    assert code.count("DFMA") >= 1
    assert code.spill_store_bytes == 0
