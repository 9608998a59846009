"""Which part of a matrix [N, K] each rank of a group has, and what ranks send each other.

Tensor parallelism of M. Shoeybi et al., *Megatron-LM* (2019), section 3:

    "column"  a rank has some rows of the matrix, so some of the N columns of y. It needs all of x
              and sends nothing; with `gather` the ranks join their columns.
    "row"     a rank has some of the K columns of the matrix. It needs the same columns of x, and
              the ranks add up their y.

A "row" layer reads what a "column" layer before it wrote, as it is: between the two, such as
between up and down, ranks send each other nothing.

                   x whole -> [column] -> y, a share -> [row] -> sum over the ranks, whole

The experts of a mixture are split likewise, or by whole experts: every rank multiplies all tokens
by what it has of the experts that they chose, and the ranks add up their y.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from steps.nn import operator as operator
from steps.nn.all_reduce import AllReduce, all_reduce_of, backends

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd import Function

torch = operator.torch
distributed = torch.distributed
if not TYPE_CHECKING:
    Function = torch.autograd.Function

KINDS: Final = ("column", "row")
"""Named after the matrix [K, N] of y = x W, as in the paper; of [N, K] they split axis 0 and 1."""

EXPERT_KINDS: Final = ("experts", "rows")
"""A rank has whole experts, or of each expert some rows of gates and ups and the same columns of
downs."""


def bounds(units: int, ranks: int) -> list[int]:
    """Rank r has the units from bounds[r] up to bounds[r + 1]."""
    return [units * rank // ranks for rank in range(ranks + 1)]


def group_of(mesh: Any) -> Any:
    """The process group of a DeviceMesh of one dimension; of None all ranks; a group itself."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError(
            "there are no ranks to share the layer: call torch.distributed.init_process_group and "
            "start the program with torchrun"
        )
    if mesh is None:
        return distributed.group.WORLD
    if not hasattr(mesh, "get_group"):
        return mesh
    if mesh.ndim != 1:
        names = ", ".join(mesh.mesh_dim_names or ())
        raise ValueError(
            f"the mesh has {mesh.ndim} dimensions ({names or 'without names'}): give one of them, "
            'such as mesh["tensor"]'
        )
    return mesh.get_group()


@dataclass(frozen=True)
class _Share:
    """One rank's share of something. group: the ranks. kind: how it is split, of `KINDS` or
    `EXPERT_KINDS`."""

    group: Any
    kind: str

    @cached_property
    def rank(self) -> int:
        return int(distributed.get_rank(self.group))

    @cached_property
    def ranks(self) -> int:
        return int(distributed.get_world_size(self.group))

    def sums(self, device: Any) -> AllReduce:
        """What adds up the y of all ranks on a device."""
        return all_reduce_of(self.group, device)

    def __deepcopy__(self, _memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a layer that ranks share cannot be pickled: save its state_dict()")

    def __str__(self) -> str:
        return f"{self.kind} {self.rank} of {self.ranks}"


@dataclass(frozen=True)
class Shard(_Share):
    """The share of one rank of `group` in a matrix [n, k].

    kind  : of `KINDS`.
    parts : how many rows each of several matrices has that lie below each other, such as (4096,
            1024, 1024) of queries, keys and values. Each is split by itself.
    unit  : rows ("column") or columns ("row") that stay together. Where the ranks do not divide
            the units of a part, some have one more than others.
    gather : whether y of a "column" layer is whole on every rank.
    Raises ValueError where a part has fewer units than there are ranks, and for other parts.
    """

    n: int
    k: int
    parts: tuple[int, ...]
    unit: int
    gather: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a layer is split by {' or '.join(KINDS)}, not by {self.kind!r}")
        if sum(self.parts) != self.n or min(self.parts) < 1:
            raise ValueError(f"parts={self.parts} must add up to the {self.n} rows of the layer")
        if self.kind == "row" and (len(self.parts) > 1 or self.gather):
            raise ValueError(
                'a layer split by "row" takes neither parts nor gather: its y is whole'
            )
        what = "rows" if self.kind == "column" else "columns"
        for size in self.sizes:
            if self.unit < 1 or size % self.unit:
                raise ValueError(f"{size} {what} are no multiple of unit={self.unit}")
            if size // self.unit < self.ranks:
                raise ValueError(
                    f"{size} {what} are {size // self.unit} units of {self.unit}, too few for "
                    f"{self.ranks} ranks: use at most {size // self.unit}"
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """What is split: the rows of each part, or the columns."""
        return self.parts if self.kind == "column" else (self.k,)

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """(first, behind the last) of a rank's rows or columns in each part."""
        found, start = [], 0
        for size in self.sizes:
            a, b = bounds(size // self.unit, self.ranks)[rank : rank + 2]
            found.append((start + a * self.unit, start + b * self.unit))
            start += size
        return found

    def count(self, rank: int) -> int:
        """A rank's rows or columns."""
        return sum(b - a for a, b in self.ranges(rank))

    def index(self, rank: int) -> np.ndarray:
        """The indices of a rank's rows or columns in the matrix, int64 [count]."""
        return np.concatenate([np.arange(a, b) for a, b in self.ranges(rank)])

    # --- arrays of the layer ---

    def share(self, whole: Tensor) -> Tensor:
        """This rank's share of a bias [n] or of blocks uint8 [n, bytes of a row]; a copy."""
        if self.kind == "column":
            return whole[self.index(self.rank)]
        if whole.ndim == 1:  # a bias is added to the sum
            return whole.clone()
        size = whole.shape[1]
        ((first, last),) = self.ranges(self.rank)
        return whole[:, size * first // self.k : size * last // self.k].clone()

    def whole(self, share: Tensor) -> Tensor:
        """What `share` was made of, from the shares of all ranks; all of them call this."""
        if self.kind == "row" and share.ndim == 1:
            return share
        through = "cpu" if backends(self.group).get("cpu") == "gloo" else "cuda"
        mine = share.detach().to(torch.device(through)).contiguous()
        axis, shape, shares = KINDS.index(self.kind), list(mine.shape), []
        for rank in range(self.ranks):
            shape[axis] = mine.shape[axis] * self.count(rank) // self.count(self.rank)
            one = mine if rank == self.rank else mine.new_empty(shape)
            source = distributed.get_global_rank(self.group, rank)
            distributed.broadcast(one, source, group=self.group)
            shares.append(one.to(share.device))
        if self.kind == "row":
            return torch.cat(shares, 1)
        found = torch.empty((self.n, *share.shape[1:]), dtype=share.dtype, device=share.device)
        for rank, one in enumerate(shares):
            found[self.index(rank)] = one
        return found

    # --- activations ---

    def input(self, x: Tensor) -> Tensor:
        """x as the rank's product reads it. Its gradient is summed over the ranks."""
        if self.kind == "column" and torch.is_grad_enabled() and x.requires_grad:
            return _SumOfGradients.apply(x, self)
        return x

    def summed(self, y: Tensor) -> Tensor:
        """The sum of all ranks' y; it may be written over y."""
        if torch.is_grad_enabled() and y.requires_grad:
            return _Sum.apply(y, self)
        return self.sums(y.device)(y)

    def gathered(self, y: Tensor) -> Tensor:
        """y [.., n] of all ranks' columns y [.., count]."""
        if torch.is_grad_enabled() and y.requires_grad:
            return _Gather.apply(y, self)
        return self.joined(y)

    def joined(self, y: Tensor) -> Tensor:
        """`gathered` without a gradient."""
        most = max(self.count(rank) for rank in range(self.ranks))
        mine = torch.nn.functional.pad(y, (0, most - y.shape[-1])).contiguous()
        found = mine.new_empty((self.ranks * mine.numel(),))
        distributed.all_gather_into_tensor(found, mine.view(-1), group=self.group)
        by_rank = found.view(self.ranks, *mine.shape)
        pieces, starts = [], [0] * self.ranks
        for part in range(len(self.parts)):
            for rank in range(self.ranks):
                a, b = self.ranges(rank)[part]
                pieces.append(by_rank[rank].narrow(-1, starts[rank], b - a))
                starts[rank] += b - a
        return torch.cat(pieces, -1)


@dataclass(frozen=True)
class ExpertsShard(_Share):
    """The share of one rank of `group` in the experts of a mixture, of which each has gates and ups
    [inner, hidden] and downs [hidden, inner].

    kind : of `EXPERT_KINDS`.
    unit : inner features that stay together, a multiple of the downs' block.
    Raises ValueError where there are fewer experts, or units, than ranks.
    """

    experts: int
    hidden: int
    inner: int
    unit: int

    def __post_init__(self) -> None:
        if self.kind not in EXPERT_KINDS:
            raise ValueError(
                f"experts are split by {' or '.join(EXPERT_KINDS)}, not by {self.kind!r}"
            )
        if self.kind == "experts" and self.experts < self.ranks:
            raise ValueError(
                f"{self.experts} experts are too few for {self.ranks} ranks: split their rows"
            )
        _ = self.rows, self.columns  # which raise

    @cached_property
    def rows(self) -> Shard:
        """Of blocks and biases of gates and ups; of whole experts also of downs."""
        if self.kind == "experts":
            return Shard(self.group, "column", self.experts, 1, (self.experts,), 1)
        parts = (self.inner,) * self.experts
        return Shard(self.group, "column", sum(parts), self.hidden, parts, self.unit)

    @cached_property
    def columns(self) -> Shard:
        """Of blocks of downs."""
        if self.kind == "experts":
            return self.rows
        n = self.experts * self.hidden
        return Shard(self.group, "row", n, self.inner, (n,), self.unit)

    @cached_property
    def own(self) -> tuple[int, int]:
        """The rank's experts: its first, and the one behind its last."""
        if self.kind == "rows":
            return 0, self.experts
        ((first, last),) = self.rows.ranges(self.rank)
        return first, last

    @property
    def own_inner(self) -> int:
        """The rank's gates of an expert."""
        if self.kind == "experts":
            return self.inner
        return self.columns.count(self.rank)

    @property
    def adds_biases(self) -> bool:
        """Whether the rank adds the biases of downs of its experts, which one of those does that
        share them."""
        return self.kind == "experts" or self.rank == 0

    def share(self, name: str, whole: Tensor) -> Tensor:
        """This rank's share of blocks uint8 [E, n, bytes of a row] or biases [E, n] of "gate", "up"
        or "down"; a copy."""
        if self.kind == "experts":
            return self.rows.share(whole)
        of = self.columns if name == "down" else self.rows
        share = of.share(whole.flatten(0, 1))
        return share.unflatten(0, (self.experts, -1))

    def whole(self, name: str, share: Tensor) -> Tensor:
        """What `share` was made of, from the shares of all ranks; all of them call this."""
        if self.kind == "experts":
            return self.rows.whole(share)
        of = self.columns if name == "down" else self.rows
        return of.whole(share.flatten(0, 1)).unflatten(0, (self.experts, -1))


class _SumOfGradients(Function):
    """x of every rank; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.sums(gradient.device)(gradient.clone()), None


class _Sum(Function):
    """The sum of all ranks' y, whose gradient each of them gets."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, shard: Shard) -> Tensor:
        return shard.sums(y.device)(y.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(Function):
    """All ranks' columns of y. Every rank has the same gradient, and takes that of its columns."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return shard.joined(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[..., ctx.shard.index(ctx.shard.rank)], None
