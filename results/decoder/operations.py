"""What a llama does between its products, in plain torch; `compiled` makes few kernels of it.

The front door's plans are launched past torch's compiler, so each of these functions is compiled
alone, once for each shape and dtype, and all layers use it. The residual h is float32, or float64
in a reference, and so is what is computed here; products take and write what they like.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from steps.nn import operator as operator

if TYPE_CHECKING:
    from torch import Tensor

torch = operator.torch
F = torch.nn.functional

PARTS: Final = 512
"""Of a row of logits, at most."""
RECOMPILED: Final = 64
"""Shapes and dtypes that torch compiles a function for before it gives up: 8, unless told."""


def looked_up(ids: Tensor, planes: tuple[Tensor, ...], centre: int) -> Tensor:
    """Rows of an embedding, float32 [*ids, K], of blocks taken apart (`model.Embedding`).

    planes: d, m: float16 [V, K/32], m empty in formats without; qs: uint8 [V, K/32, 16], or int8
    [.., 32]; qh: uint8 [V, K/32, 4], or empty.
    """
    d, m, qs, qh = (one[ids] if one.numel() else one for one in planes)
    codes = qs if qs.shape[-1] == 32 else torch.cat((qs & 15, qs >> 4), -1)
    codes = codes.to(torch.int32)
    if qh.numel():
        bit = torch.arange(32, device=ids.device, dtype=torch.int32)
        codes = codes + ((qh.to(torch.int32)[..., bit >> 3] >> (bit & 7) & 1) << 4)
    values = d.float()[..., None] * (codes - centre).float()
    if m.numel():
        values = values + m.float()[..., None]
    return values.flatten(-2)


def normed(h: Tensor, weight: Tensor, epsilon: float, dtype: Any) -> Tensor:
    """h / its root mean square * weight, for each row of h [M, width], in a product's dtype."""
    return F.rms_norm(h, (h.shape[-1],), weight, epsilon).to(dtype)


def added(
    h: Tensor, y: Tensor, weight: Tensor, epsilon: float, dtype: Any
) -> tuple[Tensor, Tensor]:
    """The residual with a product's y added, and that normed."""
    h = h + y
    return h, normed(h, weight, epsilon, dtype)


def gated(y: Tensor, dtype: Any) -> Tensor:
    """silu(gate) * up of y = [gate, up], [M, 2 hidden]."""
    gate, up = y.to(torch.promote_types(y.dtype, torch.float32)).chunk(2, -1)
    return (F.silu(gate) * up).to(dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [.., D]. Pairs are neighbours, as ggml orders a llama's rows: (a, b)
    becomes (a cos - b sin, b cos + a sin). cos has both of a pair alike, sin as (-, +)."""
    return x * cos + x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) * sin


def attended(
    qkv: Tensor,
    cache: Tensor,
    at: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    dtype: Any,
) -> Tensor:
    """What each token attends to, [B * T, heads * D], when its key and value are in the cache.

    qkv    : [B * T, (heads + 2 kv) * D]: the queries' heads, then those of keys, then of values.
    cache  : [B, 2 kv, L, D], written at positions at .. at + T - 1.
    at     : int64 [], on the device: nobody waits to know it. 0 unless T is 1.
    cos, sin : [L, D] of each position, see `turned`.
    """
    batch, twice, length, size = cache.shape
    kv = twice // 2
    x = qkv.view(batch, -1, heads + twice, size)
    tokens = x.shape[1]
    positions = at + torch.arange(tokens, device=at.device)
    c, s = cos[positions][:, None], sin[positions][:, None]
    # Queries apart from the rest, so that what reads them turns them: one kernel less.
    q = turned(x[:, :, :heads], c, s)
    is_key = (torch.arange(twice, device=at.device) < kv)[:, None]
    new = turned(x[:, :, heads:], torch.where(is_key, c, 1), torch.where(is_key, s, 0))
    new = new.transpose(1, 2).to(cache.dtype)
    cache[:, :, positions] = new

    if tokens > 1:
        k, v = new.split(kv, 1)
        q = q.transpose(1, 2).to(cache.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv)
        return y.transpose(1, 2).reshape(batch * tokens, heads * size).to(dtype)
    q = q[:, 0].view(batch, kv, heads // kv, size)
    k, v = cache.split(kv, 1)
    if torch.compiler.is_compiling():  # a kernel that adds up is soon done, one of cuBLAS is not
        scores = (q[:, :, :, None] * k[:, :, None]).sum(-1)
    else:
        scores = (q.to(k.dtype) @ k.transpose(-1, -2)).to(q.dtype)
    seen = torch.arange(length, device=at.device) <= at
    shares = torch.where(seen, scores * size**-0.5, -torch.inf).softmax(-1)
    if torch.compiler.is_compiling():
        y = (shares[..., None] * v[:, :, None]).sum(-2)
    else:
        y = shares.to(v.dtype) @ v
    return y.reshape(batch, heads * size).to(dtype)


def likeliest(logits: Tensor) -> Tensor:
    """Which of each row is the largest, int64 [B], of logits [B, V].

    In two turns, of parts of a row and of what these have: torch's own search of a whole row is
    one thread block's work, 26 us for 128256 logits on an H200.
    """
    batch, count = logits.shape
    parts = next(one for one in range(PARTS, 0, -1) if count % one == 0)
    best, at = logits.view(batch, parts, -1).max(-1)
    part = best.argmax(-1, keepdim=True)
    return (part * (count // parts) + at.gather(1, part))[:, 0]


class Operations(NamedTuple):
    """The functions of this module; `how` they are run, for a record."""

    how: str
    looked_up: Callable[..., Tensor] = looked_up
    normed: Callable[..., Tensor] = normed
    added: Callable[..., tuple[Tensor, Tensor]] = added
    attended: Callable[..., Tensor] = attended
    gated: Callable[..., Tensor] = gated
    likeliest: Callable[..., Tensor] = likeliest


PLAIN: Final = Operations("plain")
OVERLAP: Final = "triton.enable_pdl"
TUNED: Final = "coordinate_descent_tuning"
HOWS: Final = ("plain", "compiled", "overlapped")


def compiled(how: str | None = None, tuned: bool = False) -> Operations:
    """The functions compiled by torch (inductor): plain, compiled or overlapped.

    overlapped: compiled, and a kernel may begin while the one before it ends (programmatic
    dependent launch), as those of the steps do: so a product asks for its first weights during a
    norm. By default where torch and the GPU (compute capability 9.0) can, else compiled.
    tuned: the blocks of each kernel are those that were the fastest when torch tried them, which
    takes it seconds more for each function; at one token attention is a fifth faster then.
    ValueError where it was asked for and cannot be.
    """
    can = OVERLAP in torch._inductor.list_options() and torch.cuda.is_available()
    can = can and torch.cuda.get_device_capability() >= (9, 0)
    how = how or ("overlapped" if can else "compiled")
    if how == "plain":
        return PLAIN
    if how not in HOWS or (how == "overlapped" and not can):
        raise ValueError(
            f"what is between products cannot be {how!r} here: use {' or '.join(HOWS[:2])}"
            f"{', or overlapped' if can else ' (overlapped is for torch 2.11 on Hopper)'}"
        )
    torch._dynamo.config.recompile_limit = RECOMPILED
    options = {OVERLAP: True} if how == "overlapped" else {}
    options |= {TUNED: True} if tuned else {}

    def one(function: Callable[..., Any]) -> Callable[..., Any]:
        made: Callable[..., Any] = torch.compile(
            function, fullgraph=True, dynamic=False, options=options
        )
        return made

    return Operations(f"{how}, tuned" if tuned else how, *map(one, PLAIN[1:]))
