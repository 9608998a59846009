"""Humming's layers, measured here: the package `humming-kernels`, called as its documentation does.

    python -m pip install humming-kernels      (https://github.com/vllm-project/humming)

A layer quantizes a float matrix by itself and compiles its kernels at the first call. It takes
float16 A and returns float16 C, a pass that quantizes A included, so its time stands beside that of
`QuantLinear`. `results.measure.as_called` times it in the loops of its rows.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any, Final

from results.record.schema import Peer, Size

PACKAGE: Final = "humming-kernels"
W4A16: Final = "humming_w4a16"
W4A8: Final = "humming_w4a8"
SCHEMES: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    W4A16: ("int4_group32", {"dtype": "int4", "group_size": 32}, {"dtype": "float16"}),
    W4A8: ("int4_row", {"dtype": "int4"}, {"dtype": "int8"}),
}
"""Name of the baseline -> (what its weights are, the layer's weight and input configurations).

W4A16 is Q4_0: 4-bit weights with a scale for each 32. W4A8 is less exact: one scale for a row of
4-bit weights, one for a token of int8 activations."""

NMSE_LIMIT: Final = 5e-2
"""Against the weights that it quantizes: one scale for a row of 4-bit weights costs 2e-2."""


def why_not() -> str | None:
    """None where Humming can be measured here, else why not."""
    return None if _version() else f"{PACKAGE} is not installed"


def layer(name: str, weights: Any) -> Any:
    """A layer of one of `SCHEMES` with float16 weights [N, K], a tensor on the GPU."""
    from humming.layer import HummingLayer

    _, weight, input = SCHEMES[name]
    made = HummingLayer(
        shape_n=weights.shape[0],
        shape_k=weights.shape[1],
        weight_config=dict(weight),
        input_config=dict(input),
        torch_dtype=weights.dtype,
    ).cuda()
    made.load_from_unquantized(weights)
    made.transform()
    return made


def peer(name: str, size: Size, us: float) -> Peer:
    """What was measured of a scheme at a size, in the loop of our rows."""
    m, n, k = size
    return Peer(
        peer=name,
        format=SCHEMES[name][0],
        M=m,
        N=n,
        K=k,
        us=us,
        same_run=True,
        source=f"{PACKAGE} {_version()}, its layer called, float16 A to float16 C, graph",
    )


def _version() -> str | None:
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
