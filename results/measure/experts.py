"""Products of mixtures of experts beside torch's: `python -m results.measure.experts`.

A pair is what a layer multiplies for a batch of tokens: gates and ups, silu(gate) * up (gpt-oss's
clamped gate), downs, the router's weights and the sum over a token's experts. Both sides run as
CUDA graphs, in turn, and read weights from memory: other tokens choose other experts in each
repetition, of several copies of the weights. Where products of so many tokens may be "fast", that
pair takes turns too.

torch's side is bfloat16: `torch._grouped_mm` twice and the gate between, on rows that are sorted by
expert already. It is not charged for sorting, gathering and the weighted sum.

    --shapes qwen3-30b-a3b --tokens 1 4 16 64 --skewed 16 --out results/nvidia-h200/experts.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from qformats import FORMATS, quantize
from qformats.repack import byte_tiles, tiles
from results.measure.loop import Contestant, ratio, round_robin
from results.measure.protocol import Budget, Captures, GpuStopwatch
from results.measure.torch_graphs import TorchCaptures, release
from results.record.environment import environment
from steps.compile.parallel_compile import compile_ahead
from steps.contract import ACCURACIES
from steps.driver.machines import Gpu
from steps.kernels.experts.contract import ExpertsRequest
from steps.product.experts import ExpertsPlan, PackedExperts, choose, packed_arrays

SLOTS: Final = 24  # repetitions with routings of their own, taken in turn
COPIES: Final = 3
"""Of the weights, likewise: an expert comes back after several times what an L2 holds."""


@dataclass(frozen=True, slots=True)
class Layer:
    """E experts, S of them a token, hidden size H, I gates and ups."""

    experts: int
    chosen: int
    hidden: int
    inner: int
    format: str
    gate: str = "silu"

    def bytes_of(self, distinct: int) -> int:
        """Of the weights of so many experts."""
        fmt = FORMATS[self.format]
        return 3 * distinct * self.hidden * self.inner // fmt.elements * fmt.block_bytes


LAYERS: Final = {
    "qwen3-30b-a3b": Layer(128, 8, 2048, 768, "q4_0"),
    "256-experts": Layer(256, 8, 2048, 512, "q4_0"),
    "gpt-oss-20b": Layer(32, 4, 2880, 2880, "mxfp4", "clamped"),
}


ROUTINGS: Final = ("random", "zipf", "same")


def routed(layer: Layer, tokens: int, routing: str, rng: np.random.Generator) -> np.ndarray:
    """int64 [T, S]: at random, each as likely; by Zipf's law, 1 / rank; or all tokens the same."""
    rank = rng.permutation(layer.experts)
    weight = -np.log(1.0 + rank) if routing == "zipf" else np.zeros(layer.experts)
    noise = rng.gumbel(size=(1 if routing == "same" else tokens, layer.experts))
    chosen = np.argsort(-(weight + noise), axis=1)[:, : layer.chosen]
    return np.ascontiguousarray(np.broadcast_to(chosen, (tokens, layer.chosen)))


def packed(layer: Layer, n: int, k: int, machine: Gpu, copies: int) -> list[PackedExperts]:
    """Copies of weights [E, n, k]: all experts hold the numbers of one."""
    import torch
    from numba import cuda

    fmt, rng = FORMATS[layer.format], np.random.default_rng(n)
    if fmt.written:
        blocks = quantize(rng.standard_normal((n, k), np.float32), layer.format)
    else:
        from reference.drawn import random_blocks

        blocks = random_blocks(rng, n, k, layer.format)

    def repeated(pack: Any) -> Any:
        one = [torch.from_numpy(x).cuda() for x in packed_arrays(blocks[None], pack)]
        return [
            tuple(cuda.as_cuda_array(x.repeat(layer.experts)) for x in one) for _ in range(copies)
        ]

    size = layer.format, layer.experts, n, k
    made = [
        PackedExperts(*size, exact, machine, fast)
        for exact, fast in zip(repeated(tiles), repeated(byte_tiles), strict=True)
    ]
    torch.cuda.synchronize()
    return made


def requests_of(
    layer: Layer, tokens: int, dtype: str, accuracy: str = "exact"
) -> tuple[ExpertsRequest, ExpertsRequest]:
    """Those of a pair. Clamped gates of bfloat16 A are float16, as in `steps.nn.experts`."""
    of_gates = "float16" if layer.gate == "clamped" and dtype == "bfloat16" else dtype
    of_bias = dtype if layer.gate == "clamped" else None
    up = ExpertsRequest(
        layer.format, tokens, layer.chosen, layer.experts, 2 * layer.inner, layer.hidden, dtype,
        of_gates, "int64", bias=of_bias, gate=layer.gate, leads=True, accuracy=accuracy,
    )  # fmt: skip
    down = ExpertsRequest(
        layer.format, tokens, layer.chosen, layer.experts, layer.hidden, layer.inner, of_gates,
        dtype, "int64", True, of_bias, router="float32", follows=True, accuracy=accuracy,
    )  # fmt: skip
    return up, down


class Pair:
    """The products of a layer for `tokens` tokens, by the experts of each slot."""

    def __init__(
        self, layer: Layer, tokens: int, dtype: str, accuracy: str, weights: Any, ids: Sequence[Any]
    ) -> None:
        import torch

        kind = getattr(torch, dtype)
        up, down = weights
        requests = requests_of(layer, tokens, dtype, accuracy)
        self.ids, of_bias = ids, requests[0].bias
        self.plans = [
            (ExpertsPlan(one, requests[0], None), ExpertsPlan(other, requests[1], None))
            for one, other in zip(up, down, strict=True)
        ]
        self.bias: tuple[Any, Any] = (None, None)
        if of_bias:
            shapes = ((layer.experts, 2 * layer.inner), (layer.experts, layer.hidden))
            first, second = (torch.zeros(one, dtype=kind, device="cuda") for one in shapes)
            self.bias = first, second
        self.a = torch.randn(tokens, layer.hidden, device="cuda").to(kind)
        of_gates = getattr(torch, requests[0].c)
        self.x = torch.empty(tokens, layer.chosen, layer.inner, dtype=of_gates, device="cuda")
        self.y = torch.empty(tokens, layer.hidden, dtype=kind, device="cuda")
        self.router = torch.full((tokens, layer.chosen), 1 / layer.chosen, device="cuda")

    def first(self, slot: int) -> None:
        up, _ = self.plans[slot % len(self.plans)]
        up(self.a, self.ids[slot], self.x, bias=self.bias[0])

    def second(self, slot: int) -> None:
        _, down = self.plans[slot % len(self.plans)]
        down(self.x, self.ids[slot], self.y, bias=self.bias[1], router=self.router)


class Grouped:
    """The same of torch, in bfloat16."""

    def __init__(self, layer: Layer, tokens: int, weights: Any, ids: Sequence[Any]):
        import torch

        self.layer, self.weights = layer, weights
        self.offsets = []
        for one in ids:
            counts = torch.bincount(one.reshape(-1), minlength=layer.experts)
            self.offsets.append(counts.cumsum(0).to(torch.int32))
        rows = tokens * layer.chosen
        self.a = torch.randn(rows, layer.hidden, device="cuda").to(torch.bfloat16)

    def __call__(self, slot: int) -> None:
        import torch

        up, down = self.weights
        y = torch._grouped_mm(self.a, up, offs=self.offsets[slot])
        gate, ups = y.chunk(2, dim=1)
        torch._grouped_mm(torch.nn.functional.silu(gate) * ups, down, offs=self.offsets[slot])


def float_weights(layer: Layer) -> Any:
    import torch

    def one(n: int, k: int) -> Any:
        w = torch.empty(layer.experts, n, k, dtype=torch.bfloat16, device="cuda")
        return w.normal_(std=0.02).transpose(1, 2)

    return one(2 * layer.inner, layer.hidden), one(layer.hidden, layer.inner)


def is_fast(layer: Layer, tokens: int, dtype: str, machine: Any) -> bool:
    """Whether a pair has other kernels where it may be fast."""
    requests = requests_of(layer, tokens, dtype, "fast")
    return any(choose(one, machine).kernel.accuracy == "fast" for one in requests)


def _calls(*args: Any) -> list[Callable[[], None]]:
    """Those of a slot, which comes last."""
    *calls, slot = args
    return [partial(call, slot) for call in calls]


def measured(
    name: str, tokens: Sequence[int], skewed: Sequence[int], dtype: str, budget: Budget,
    say: Callable[[str], None], beside: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each number of tokens and routing."""
    import torch

    layer, machine, rows = LAYERS[name], Gpu(), []
    device = TorchCaptures(GpuStopwatch())
    weights = (
        packed(layer, 2 * layer.inner, layer.hidden, machine, COPIES),
        packed(layer, layer.hidden, layer.inner, machine, COPIES),
    )
    floats = float_weights(layer) if beside else None
    for t in tokens:
        for routing in ROUTINGS if t in skewed else ROUTINGS[:1]:
            rng = np.random.default_rng(t)
            host = [routed(layer, t, routing, rng) for _ in range(SLOTS)]
            ids = [torch.from_numpy(one).cuda() for one in host]
            distinct = float(np.mean([len(np.unique(one)) for one in host]))
            pair = Pair(layer, t, dtype, "exact", weights, ids)
            works = {
                "pair": partial(_calls, pair.first, pair.second),
                "up": partial(_calls, pair.first),
                "down": partial(_calls, pair.second),
            }
            if is_fast(layer, t, dtype, machine):
                fast = Pair(layer, t, dtype, "fast", weights, ids)
                works["fast"] = partial(_calls, fast.first, fast.second)
            if beside:
                works["torch"] = partial(_calls, Grouped(layer, t, floats, ids))
            for work in works.values():
                for call in work(0):
                    device.warm_up(call)
            found = {
                key: Contestant(cast(Captures, device), work, SLOTS, budget)
                for key, work in works.items()
            }
            round_robin(device.stopwatch, list(found.values()), budget)
            row = {
                "layer": name, **asdict(layer), "tokens": t, "routing": routing, "dtype": dtype,
                "distinct_experts": distinct,
                "ideal_us_at_4.8_TB_s": layer.bytes_of(1) * distinct / 4.8e6,
            }  # fmt: skip
            for key, one in found.items():
                row[f"{key}_us"], row[f"{key}_spread"] = one.timing.us, one.timing.spread
            if beside:
                row["x_torch"] = ratio(found["torch"].times, found["pair"].times)
            if beside and "fast" in found:
                row["fast_x_torch"] = ratio(found["torch"].times, found["fast"].times)
            rows.append(row)
            say(
                f"{name} T={t} {routing} {dtype}: "
                + ", ".join(f"{key} {one.timing.us:.2f}" for key, one in found.items())
                + f" us; weights at 4.8 TB/s {row['ideal_us_at_4.8_TB_s']:.2f}"
            )
            del found
    del weights, floats
    release()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 512, 4096])
    parser.add_argument(
        "--skewed", nargs="*", type=int, default=[4, 16, 64],
        help="tokens that also choose by Zipf's law, and all the same experts (default: 4 16 64)",
    )  # fmt: skip
    parser.add_argument("--dtype", nargs="+", default=["float16"])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each row's rounds")
    parser.add_argument("--alone", action="store_true", help="without torch's side")
    parser.add_argument("--out", type=Path, help="where to write JSON")
    args = parser.parse_args()
    env = environment()
    budget = Budget(seconds=args.seconds, warm_seconds=args.seconds / 4)
    rows: list[dict[str, Any]] = []
    machine = Gpu()
    wanted = [
        choose(request, machine)
        for name in args.shapes
        for dtype in args.dtype
        for t in args.tokens
        for accuracy in ACCURACIES
        for request in requests_of(LAYERS[name], t, dtype, accuracy)
    ]
    compile_ahead(wanted, machine, print)
    for name in args.shapes:
        for dtype in args.dtype:
            rows += measured(
                name, args.tokens, args.skewed, dtype, budget, lambda x: print(x, flush=True),
                not args.alone,
            )  # fmt: skip
            if args.out:
                record = {"schema": 1, "env": asdict(env), "rows": rows}
                args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
