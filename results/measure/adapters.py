"""LoRA over a quantized layer beside the layer alone: `python -m results.measure.adapters`.

At each shape the layer, the layer with adapters of several ranks (`steps.nn.lora`), and the same
adapters by PEFT's own forward run as CUDA graphs in one loop, in turn. Weights are read from
memory, and so are A and B: each copy of the layer has its own. Adapters are float32, as PEFT makes
them; the kernel reads 16-bit copies of them. The host's time for an eager call is measured beside.

    --formats q4_0 q8_0 --tokens 1 8 --ranks 8 16 64 --seconds 0.4 --out results/...json
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from qformats import quantize
from results.measure.as_called import host_us
from results.measure.loop import Contestant, ratio, round_robin
from results.measure.protocol import Budget, GpuStopwatch, slots_for
from results.measure.torch_graphs import TorchCaptures, release
from results.record.environment import environment, finished
from steps.compile.parallel_compile import compile_ahead
from steps.driver.machines import Gpu

SHAPES: Final = ((4096, 4096), (14336, 4096), (6144, 4096), (4096, 14336))  # (N, K)
DRAWN: Final = 256  # rows of weights; the others repeat them
NMSE_LIMIT: Final = 1e-5
"""Of the kernel's y against PEFT's: roundings of float16, and of A and B to 16 bits."""


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds of the layer alone, with an adapter, and by PEFT: in a graph, and of the host
    for an eager call. x_layer: of the graphs, with the adapter over alone."""

    format: str
    M: int
    N: int
    K: int
    rank: int
    layer_us: float
    us: float
    p20_us: float
    p80_us: float
    x_layer: float
    peft_us: float
    layer_host_us: float
    host_us: float
    peft_host_us: float


class Layers:
    """Copies of a quantized layer, alone and with an adapter of each rank."""

    def __init__(self, format: str, n: int, k: int, ranks: Sequence[int], l2_bytes: int) -> None:
        import torch
        from peft import LoraConfig

        from steps.nn.linear import QuantLinear
        from steps.nn.lora import LoraLinear

        rng = np.random.default_rng(0)
        drawn = quantize(rng.standard_normal((DRAWN, k), np.float32) / np.float32(64), format)
        first = QuantLinear.from_blocks(np.concatenate([drawn] * (n // DRAWN))).to("cuda")
        first.dtype = torch.float16
        slots = slots_for(first.device_bytes, l2_bytes)
        self.torch, self.n, self.k = torch, n, k
        self.plain = [first, *(copy.deepcopy(first) for _ in range(slots - 1))]
        self.adapted: dict[int, list[Any]] = {}
        for rank in ranks:
            config = LoraConfig(r=rank, lora_alpha=2 * rank, init_lora_weights=False)
            options = {"config": config, "r": rank, "lora_alpha": 2 * rank}
            made = [LoraLinear(one, "default", **options) for one in self.plain]
            self.adapted[rank] = [
                one.to("cuda").float().eval().requires_grad_(False) for one in made
            ]
        for one in self.plain:
            one.dtype = torch.float16

    def calls(self, layers: Sequence[Any], x: Any) -> list[Callable[[], Any]]:
        return [partial(one, x) for one in layers]

    def pefts(self, layers: Sequence[Any], x: Any) -> list[Callable[[], Any]]:
        """PEFT's own forward."""
        from peft.tuners.lora.layer import Linear

        return [partial(Linear.forward, one, x) for one in layers]


def recipes(layers: Layers, tokens: Sequence[int], ranks: Sequence[int]) -> list[Any]:
    """What is launched, for `compile_ahead`."""
    from steps.nn import lora

    held = layers.plain[0]._on_gpu()
    found: list[Any] = [held.choice(m, "float16", "float16") for m in tokens]
    found += [
        lora.recipe_of(held, m, "float16", None, lora.low_rank.padded(rank))
        for m in tokens
        for rank in ranks
    ]
    return found


def measure(
    layers: Layers, format: str, m: int, stopwatch: GpuStopwatch, budget: Budget
) -> list[Row]:
    """The rows of one shape: one loop."""
    from steps.nn.lora import reserve_words

    torch = layers.torch
    captures = TorchCaptures(stopwatch)
    seeded = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(m, layers.k, device="cuda", generator=seeded).half()
    reserve_words(x)  # of the captures: one that finds none would hold a memset
    calls = {("layer", 0): layers.calls(layers.plain, x)}
    for rank, adapted in layers.adapted.items():
        calls["fused", rank] = layers.calls(adapted, x)
        calls["peft", rank] = layers.pefts(adapted, x)
    for rank in layers.adapted:
        for every in calls["fused", rank]:
            y = captures.warm_up(every, 1)  # each makes its copies of A and B
        right = captures.warm_up(calls["peft", rank][-1]).double()
        error = float(((y.double() - right) ** 2).mean() / (right**2).mean())
        if not error <= NMSE_LIMIT:
            raise RuntimeError(f"rank {rank} at M={m} is wrong: NMSE {error:.1e}")
    entered = {
        key: Contestant(captures, lambda slot, own=own: (own[slot],), len(own), budget)  # type: ignore[misc]
        for key, own in calls.items()
        if captures.warm_up(own[0]) is not None
    }
    round_robin(stopwatch, list(entered.values()), budget)
    host = {key: host_us(own[0], torch.cuda.synchronize) for key, own in calls.items()}
    alone, rows = entered["layer", 0], []
    for rank in layers.adapted:
        ours, theirs = entered["fused", rank], entered["peft", rank]
        timing = ours.timing
        rows.append(
            Row(
                *(format, m, layers.n, layers.k, rank, alone.timing.us),
                *(timing.us, timing.p20_us, timing.p80_us, ratio(ours.times, alone.times)),
                theirs.timing.us,
                *(host["layer", 0], host["fused", rank], host["peft", rank]),
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["q4_0", "q8_0"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 16, 64])
    parser.add_argument("--seconds", type=float, default=0.4, help="of a loop")
    parser.add_argument("--out", type=Path, help="where to write JSON")
    args = parser.parse_args()
    env, machine, stopwatch = environment(), Gpu(), GpuStopwatch()
    budget = Budget(
        replay_seconds=1.5e-3, seconds=args.seconds, warm_seconds=args.seconds / 4, min_rounds=10
    )
    rows: list[Row] = []
    import torch

    with torch.no_grad():
        for n, k in SHAPES:
            for format in args.formats:
                layers = Layers(format, n, k, args.ranks, stopwatch.l2_bytes)
                compile_ahead(recipes(layers, args.tokens, args.ranks), machine, print, fewest=3)
                for m in args.tokens:
                    for row in measure(layers, format, m, stopwatch, budget):
                        print(json.dumps(asdict(row)), flush=True)
                        rows.append(row)
                    if args.out:
                        record = {
                            "schema": 1,
                            "env": asdict(finished(env)),
                            "rows": [asdict(one) for one in rows],
                        }
                        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
                del layers
                release()


if __name__ == "__main__":
    main()
