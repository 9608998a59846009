"""One model on several GPUs, a process for each: tensor parallelism.

    ranks = Ranks.started(on_gpu=True)                      # in a process that torchrun started
    model = files.load("model.gguf", step_products(), ranks=ranks)

A rank has some of the heads, with their rows of queries, keys and values and their columns of the
matrix behind attention, and their keys and values alone in its cache; some of the hidden features,
with their rows of gate and up and their columns of down; and some rows of the logits' matrix. It
has all of the embedding, which is looked up and not multiplied, and of the norms. In each layer
ranks add up their products twice; in the end they join their logits. So all of them have the same
bits, and choose the same token.

A prompt goes through each layer in two halves, where sums can travel while the GPU multiplies:

    this stream    attention of half 0 | of half 1     | feed-forward of 0 | of 1          | ...
    sums                               | of half 0     | of half 1         | of half 0     | ...
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from qformats import FORMATS
from steps.decoder.model import Config
from steps.nn import all_reduce
from steps.nn import operator as operator
from steps.nn.shard import bounds

if TYPE_CHECKING:
    from torch import Tensor, nn

torch = operator.torch
distributed = torch.distributed
if not TYPE_CHECKING:
    nn = torch.nn

PATIENCE: Final = timedelta(hours=1)
"""How long a rank waits for the others, one of which may be typed at."""
MANY_TOKENS: Final = 512
"""From so many on a prompt is halved. Fewer would not fill a GPU with each."""
TILE: Final = 128
"""Tokens of a tile of C: the first half is whole tiles."""
OF_LOGITS: Final = ("output", "token_embd")
OF_COLUMNS: Final = ("attn_output", "ffn_down")
"""Matrices by their tensor's name: those whose columns ranks share. Of others it is the rows."""


@dataclass(frozen=True)
class Share:
    """What rank `rank` of `ranks` has of a model of these sizes.

    A head of keys and values goes with the heads of queries that read it. Up to as many ranks as
    there are of these may share a model, some with one more than others; beyond that several ranks
    have the same one, and each as many of its queries.

    unit: hidden features that stay together, a block of the matrices down. ValueError where the
    ranks cannot share the heads, or are too many for the hidden features.
    """

    whole: Config
    rank: int
    ranks: int
    unit: int = 32

    def __post_init__(self) -> None:
        heads, kv, count = self.whole.heads, self.whole.kv_heads, self.ranks
        good = [n for n in range(1, heads + 1) if n <= kv or not (heads % n or n % kv)]
        if self.whole.experts:
            raise ValueError(
                f"{self.whole.experts} experts a layer are not shared among GPUs: use one"
            )
        if count not in good:
            raise ValueError(
                f"{count} GPUs cannot share {heads} heads and {kv} of keys and values: use "
                f"{', '.join(map(str, good[:-1]))} or {good[-1]}"
            )
        if self.whole.hidden % self.unit or self.whole.hidden // self.unit < count:
            raise ValueError(
                f"{self.whole.hidden} hidden features in blocks of {self.unit} are too few for "
                f"{count} GPUs: use fewer"
            )

    def _range(self, units: int) -> tuple[int, int]:
        a, b = bounds(units, self.ranks)[self.rank : self.rank + 2]
        return a, b

    @cached_property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """(first, behind the last) row or column of each matrix."""
        one, each = self.whole, self.whole.heads // self.whole.kv_heads
        if self.ranks <= one.kv_heads:
            keys = self._range(one.kv_heads)
            heads = keys[0] * each, keys[1] * each
        else:
            heads = self._range(one.heads)
            keys = heads[0] // each, heads[0] // each + 1
        queries, keys = ((a * one.head_dim, b * one.head_dim) for a, b in (heads, keys))
        a, b = self._range(one.hidden // self.unit)
        hidden = a * self.unit, b * self.unit
        most = -(-one.vocabulary // self.ranks)
        logits = self.rank * most, (self.rank + 1) * most
        return {
            "attn_q": queries, "attn_k": keys, "attn_v": keys, "attn_output": queries,
            "ffn_gate": hidden, "ffn_up": hidden, "ffn_down": hidden,
            "output": logits, "token_embd": logits,
        }  # fmt: skip

    @cached_property
    def config(self) -> Config:
        """The sizes of the share; the vocabulary is whole."""
        one = self.ranges
        q, k, hidden = (one[name][1] - one[name][0] for name in ("attn_q", "attn_k", "ffn_up"))
        size = self.whole.head_dim
        return replace(self.whole, heads=q // size, kv_heads=k // size, hidden=hidden)

    def of(self, name: str, array: np.ndarray) -> np.ndarray:
        """The share of a tensor [N, blocks of a row], [N, K] or, of a bias, [N]; of logits that
        there are not, zeros. A bias of sums is rank 0's. ValueError where a block would be cut."""
        kind = name.split(".")[-2]
        a, b = self.ranges[kind]
        if kind not in OF_COLUMNS:
            part = array[a:b]
            missing = np.zeros((b - a - len(part), *array.shape[1:]), array.dtype)
            return np.concatenate([part, missing]) if len(missing) else part
        if array.ndim == 1:
            return array if self.rank == 0 else np.zeros_like(array)
        columns = self.whole.hidden
        if kind == "attn_output":
            columns = self.whole.heads * self.whole.head_dim
        size = columns // array.shape[1]  # of a block
        if a % size or b % size:
            raise ValueError(
                f"{name} has blocks of {size}, and GPU {self.rank} of {self.ranks} would have its "
                f"columns {a} to {b - 1}: use fewer GPUs"
            )
        return array[:, a // size : b // size]


@dataclass(frozen=True)
class Ranks:
    """The processes of one model: this one's number, how many, and the device that it has."""

    rank: int
    count: int
    device: Any

    @classmethod
    def started(cls, on_gpu: bool) -> Ranks | None:
        """The ranks that torchrun started, over NCCL, or gloo on the CPU; None without torchrun."""
        if "LOCAL_RANK" not in os.environ:
            return None
        local = int(os.environ["LOCAL_RANK"])
        if on_gpu:
            from numba import cuda

            os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast by the NVLink switch
            torch.cuda.set_device(local)
            cuda.select_device(local)
        kinds = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        distributed.init_process_group(kinds, timeout=PATIENCE)
        atexit.register(_end)
        device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
        return cls(distributed.get_rank(), distributed.get_world_size(), device)

    @property
    def group(self) -> Any:
        return distributed.group.WORLD

    @cached_property
    def sums(self) -> all_reduce.AllReduce:
        return all_reduce.all_reduce_of(self.group, self.device)

    def share(self, config: Config, unit: int = 32) -> Share:
        return Share(config, self.rank, self.count, unit)

    def joined(self, product: Any, name: str, n: int) -> Any:
        """What this rank's product with a matrix of this name becomes, y of all ranks [M, n]: a
        sum, logits side by side, or, where each rank goes on with its own, what it is."""
        kind = name.split(".")[-2]
        if kind in OF_COLUMNS:
            return Summed(product, self.sums, n, OF_COLUMNS.index(kind))
        return Gathered(product, self.group, n) if kind in OF_LOGITS else product

    def wait(self) -> None:
        """Wait on the host until all ranks do, for an hour at most."""
        distributed.all_reduce(torch.zeros(1), group=self.group)

    def of_first(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        values = [value]
        distributed.broadcast_object_list(values, 0, group=self.group, device=torch.device("cpu"))
        return values[0]

    def leave(self, status: int) -> NoReturn:
        """End this process with `status`, when all ranks are here. Not by way of the interpreter's
        end: a thread of gloo that is still there aborts the process in it."""
        self.wait()
        _end()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def typed(self, asks: str = "") -> str:
        """`input`, typed at rank 0. EOFError on all ranks where it ends."""
        text = None
        if self.rank == 0:
            try:
                text = input(asks)
            except (EOFError, KeyboardInterrupt):
                text = None
        text = self.of_first(text)
        if text is None:
            raise EOFError
        return text


def _end() -> None:
    """Leave the group. CUDA graphs that hold sums go first, as NCCL waits for that."""
    gc.collect()
    distributed.destroy_process_group()


class Joined(nn.Module):
    """A product of this rank, whose y the ranks join: `forward` of x [M, K] gives all of them the
    same y [M, n]."""

    def __init__(self, product: Any) -> None:
        super().__init__()
        self.products = nn.ModuleList([product])

    @property
    def accuracy(self) -> str:
        found: str = self.products[0].accuracy
        return found

    def input_dtype(self, m: int) -> Any:
        return self.products[0].input_dtype(m)


class Summed(Joined):
    """The sum of all ranks' products with their columns of a matrix.

    Up to `all_reduce.ONE_SHOT` bytes it is one of float32; more are summed in the dtype of the
    product, each rank's rounded by itself. Two GPUs may add up few tokens within the product
    (`steps.decoder.deferred`).

    turn: 0 or 1, another one than that of the sums before and after it.
    """

    def __init__(self, product: Any, sums: all_reduce.AllReduce, n: int, turn: int = 0) -> None:
        super().__init__(product)
        self.sums, self.n, self.turn = sums, n, turn
        product.wide = all_reduce.ONE_SHOT // 4 // n

    def places(self, tokens: int) -> tuple[Tensor, Tensor] | None:
        """Where the product itself can exchange y, see `all_reduce.AllReduce.places`."""
        return self.sums.places(tokens * self.n, self.turn)

    def forward(self, x: Tensor) -> Tensor:
        return self.sums(self.products[0](x))

    def after_swiglu(self, y: Tensor, swiglu: Any) -> Tensor:
        return self.sums(self.products[0].after_swiglu(y, swiglu))

    def begin(self, x: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Begin what `forward` returns, see `all_reduce.AllReduce.begin`."""
        return self.sums.begin(self.products[0](x))

    def parts(self, sequences: int, tokens: int) -> list[int]:
        """Tokens of each sequence that are best multiplied together: all, or about half of them."""
        half = -(-tokens // (2 * TILE)) * TILE
        many = sequences * tokens >= MANY_TOKENS and half < tokens
        if many and self.sums.travels(sequences * half * self.n):
            return [half, tokens - half]
        return [tokens]


class Gathered(Joined):
    """All ranks' rows of a matrix, as many on each: the last ones of the last rank may be too many,
    and are left out."""

    def __init__(self, product: Any, group: Any, n: int) -> None:
        super().__init__(product)
        self.group, self.n = group, n

    def forward(self, x: Tensor) -> Tensor:
        return self.gathered(self.products[0](x).contiguous())

    def gathered(self, mine: Tensor) -> Tensor:
        """All ranks' y, of this one's."""
        ranks = distributed.get_world_size(self.group)
        found = mine.new_empty((ranks * len(mine), mine.shape[1]))
        distributed.all_gather_into_tensor(found, mine, group=self.group)
        by_rank = found.view(ranks, *mine.shape)
        return by_rank.transpose(0, 1).flatten(1)[:, : self.n].contiguous()


# --- starting ranks -------------------------------------------------------------------------------


def start(module: str, arguments: Sequence[str], count: int, on_gpu: bool) -> NoReturn:
    """Become torchrun with `count` processes of python -m module, with these arguments.

    ValueError where there are fewer GPUs.
    """
    if count < 2:
        raise ValueError(f"--gpus {count}: name 2 or more, or none")
    there = torch.cuda.device_count() if on_gpu else count
    if there < count:
        raise ValueError(f"--gpus {count}: torch finds {there} on {socket.gethostname()}")
    # torchrun would set 1, and say so; packing takes all cores
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # all of them are on this host
        os.environ.setdefault(name, "lo")
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    os.execv(sys.executable, [sys.executable, *run, "-m", module, *arguments])


def unit_of(file: Any) -> int:
    """Columns of the largest block in a file's matrices down."""
    blocks = [
        FORMATS[one.type].elements
        for name, one in file.tensors.items()
        if ".ffn_down." in name and one.type in FORMATS
    ]
    return max(blocks, default=32)
