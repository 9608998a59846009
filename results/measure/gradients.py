"""The gradient of x of a `QuantLinear` beside that of a torch.nn.Linear of its dtype.

    python -m results.measure.gradients --json results/nvidia-h200/gradients.json

needs a GPU and torch. GPU time is that of calls in CUDA graphs, weights rotated, all formats in
turn with torch in one loop (`results.measure.loop`):

    gradient    dX = dY @ W alone: W is unpacked and torch multiplies; torch.matmul
    step        y of x, and then dX, by torch's autograd: what a frozen layer costs in training

Rows of W are drawn once and repeated; torch's are those of the first format, dequantized.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from qformats import FORMATS, quantize
from reference import nmse
from reference.drawn import random_blocks
from results.measure.loop import Contestant, ratio, round_robin
from results.measure.protocol import Budget, GpuStopwatch, slots_for
from results.measure.torch_graphs import TorchCaptures, release
from results.record.environment import environment, finished
from steps.contract import Size
from steps.nn import operator
from steps.nn.linear import QuantLinear

torch = operator.torch

DEVICE: Final = "cuda"
FORMATS_MEASURED: Final = ("q4_0", "q8_0", "q6_k")
DTYPES: Final = ("bfloat16", "float16")
SIZES: Final[tuple[Size, ...]] = tuple(
    (m, n, k) for n, k in ((4096, 4096), (14336, 4096), (4096, 14336)) for m in (512, 4096)
)
BUDGET: Final = Budget(replay_seconds=2e-3, warm_seconds=0.2, seconds=1.0)

DRAWN: Final = 1024  # rows of W; others repeat them
COUNTERS: Final = 1 << 22  # bytes that the captures of a loop take their counters from
CHECKED: Final = 32  # rows of dX
NMSE_LIMIT: Final = 2e-5
"""Of dX: rounding W and dX to bfloat16 adds 3e-6 each; a wrong dX has an error of its own size."""

Call = Callable[[], Any]


def weights(format_name: str, n: int, k: int) -> np.ndarray:
    """Blocks of n rows, `DRAWN` of them different."""
    rng = np.random.default_rng(0)
    if FORMATS[format_name].written:
        values = np.float32(0.02) * rng.standard_normal((min(n, DRAWN), k), np.float32)
        blocks = quantize(values, format_name)
    else:
        blocks = random_blocks(rng, min(n, DRAWN), k, format_name)
    return np.concatenate([blocks] * -(-n // DRAWN))[:n]


def step(product: Callable[[Any], Any], x: Any, upstream: Any) -> Any:
    """y of x and the gradient of x, which is returned."""
    return torch.autograd.grad(product(x), x, upstream)[0]


class Sides:
    """Layers and torch's Linears of one N x K and dtype, as many copies as fill the rotation."""

    def __init__(self, n: int, k: int, dtype: Any, l2_bytes: int) -> None:
        self.n, self.k, self.dtype, self.w = n, k, dtype, {}
        self.layers: dict[str, list[Any]] = {}
        for name in FORMATS_MEASURED:
            layer = QuantLinear.from_blocks(weights(name, n, k)).to(DEVICE, dtype)
            slots = slots_for(layer.device_bytes, l2_bytes)
            self.layers[name] = [layer, *(copy.deepcopy(layer) for _ in range(slots - 1))]
            self.w[name] = layer.dequantize()
        plain = self.w[FORMATS_MEASURED[0]].to(dtype)
        self.plain = [plain.clone() for _ in range(slots_for(plain.nbytes, l2_bytes))]

    def calls(self, m: int) -> dict[str, tuple[list[Call], list[Call], Any]]:
        """By format, and "torch": calls of the gradient, of the step, and dX [M, K] in float64 of
        some rows."""
        rng = torch.Generator().manual_seed(m)
        x, dy = (
            torch.randn(m, size, generator=rng).to(DEVICE, self.dtype) for size in (self.k, self.n)
        )
        x.requires_grad_()
        made = {}
        for name, layers in self.layers.items():
            back = operator.linear_input_gradient
            gradient: list[Call] = [partial(back, dy, *one.unpacked_from) for one in layers]
            both: list[Call] = [partial(step, one, x, dy) for one in layers]
            made[name] = gradient, both, dy[:CHECKED].double() @ self.w[name].double()
        linear = torch.nn.functional.linear
        gradient = [partial(torch.matmul, dy, one) for one in self.plain]
        both = [partial(step, partial(linear, weight=one), x, dy) for one in self.plain]
        made["torch"] = gradient, both, made[FORMATS_MEASURED[0]][2]
        return made


def contestant(captures: Any, calls: Sequence[Call], right: Any, budget: Budget) -> Contestant:
    """RuntimeError where its dX is wrong."""
    found = captures.warm_up(calls[0])[:CHECKED].double()
    error = nmse(found.cpu().numpy(), right.cpu().numpy())
    if not error <= NMSE_LIMIT:
        raise RuntimeError(f"dX is wrong: NMSE {error:.1e}, the limit is {NMSE_LIMIT:.0e}")
    return Contestant(captures, lambda slot: (calls[slot],), len(calls), budget)


def measure(
    stopwatch: Any, sizes: Sequence[Size] = SIZES, budget: Budget = BUDGET
) -> Iterator[list[dict[str, Any]]]:
    """The rows of one loop after another. The times of torch are of the same rounds."""
    captures = TorchCaptures(stopwatch)
    for dtype in DTYPES:
        for n, k in dict.fromkeys(size[1:] for size in sizes):
            sides = Sides(n, k, getattr(torch, dtype), stopwatch.l2_bytes)
            for m in (size[0] for size in sizes if size[1:] == (n, k)):
                operator.reserve_counters(torch.empty(0, device=DEVICE).device, COUNTERS)
                loop = {
                    name: [contestant(captures, one, right, budget) for one in (gradient, both)]
                    for name, (gradient, both, right) in sides.calls(m).items()
                }
                round_robin(stopwatch, [one for each in loop.values() for one in each], budget)
                theirs = loop.pop("torch")
                yield [
                    {
                        **{"format": name, "dtype": dtype, "M": m, "N": n, "K": k},
                        "gradient": _figures(ours[0], theirs[0]),
                        "step": _figures(ours[1], theirs[1]),
                    }
                    for name, ours in loop.items()
                ]
                release()
            del sides
            release()


def _figures(ours: Contestant, theirs: Contestant) -> dict[str, float]:
    """Microseconds, and how many times as long torch takes, the median of the rounds."""
    figures = asdict(ours.timing) | {"torch_us": theirs.timing.us}
    figures["x_torch"] = ratio(theirs.times, ours.times)
    return {key: one if key == "rounds" else float(f"{one:.6g}") for key, one in figures.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m results.measure.gradients")
    parser.add_argument("--json", type=Path, help="where the record goes")
    path = parser.parse_args(arguments).json
    env, rows, versions = environment(), [], {"torch": torch.__version__}
    for loop in measure(GpuStopwatch()):
        rows += loop
        for row in loop:
            told = ", ".join(f"{key} {row[key]}" for key in ("format", "dtype", "M", "N", "K"))
            for what in ("gradient", "step"):
                told += f"; {what} {row[what]['us']:.1f} us, torch {row[what]['torch_us']:.1f}"
            print(told, flush=True)
        if path:
            record = {"schema": 1, "env": asdict(finished(env)), "versions": versions, "rows": rows}
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
