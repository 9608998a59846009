"""What a llama does between its products, in plain torch.

The residual h is float32, or float64 in a reference, and so is what is computed here. The products
read and write dtypes of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from steps.nn import operator as operator

if TYPE_CHECKING:
    from torch import Tensor

torch = operator.torch
F = torch.nn.functional


def rms_norm(h: Tensor, weight: Tensor, epsilon: float, dtype: Any) -> Tensor:
    """h / its root mean square * weight, for each row of h [M, width], in the given dtype."""
    return F.rms_norm(h, (h.shape[-1],), weight, epsilon).to(dtype)


def add_and_norm(
    h: Tensor, y: Tensor, weight: Tensor, epsilon: float, dtype: Any, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The residual with a product's y added, and its `rms_norm`. other: a second term of y."""
    h = h + (y if other is None else y.to(h.dtype) + other)
    return h, rms_norm(h, weight, epsilon, dtype)


def choose_experts(logits: Tensor, chosen: int, normed: bool) -> tuple[Tensor, Tensor]:
    """The likeliest experts of logits [M, E]: int32 [M, chosen], and their shares of the softmax,
    which add up to 1 if normed."""
    shares, ids = logits.softmax(-1).topk(chosen)
    return ids.to(torch.int32), shares / shares.sum(-1, keepdim=True) if normed else shares


def swiglu(y: Tensor, dtype: Any) -> Tensor:
    """silu(gate) * up of y = [gate, up], [M, 2 hidden]."""
    gate, up = y.to(torch.promote_types(y.dtype, torch.float32)).chunk(2, -1)
    return (F.silu(gate) * up).to(dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [.., D]. Pairs are neighbours, as ggml orders a llama's rows: (a, b)
    becomes (a cos - b sin, b cos + a sin). cos is the same for both of a pair; sin is (-, +).
    Models of another order have their rows put in this one when they are read (`files`)."""
    return x * cos + x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) * sin


def attention(
    qkv: Tensor,
    cache: Tensor,
    position: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    dtype: Any,
    head_norms: tuple[Tensor, Tensor, float] | None = None,
    first: int = 0,
) -> Tensor:
    """Attention of each token, [B * T, heads * D], after its key and value are put in the cache.

    qkv      : [B * T, (heads + 2 kv) * D]: the queries' heads, then those of keys, then of values.
    cache    : [B, 2 kv, L, D], written at positions `position` ... + T - 1.
    position : int64 [], on the device, so that nothing waits for it; of T > 1 it is `first`.
    cos, sin : [L, D] of each position, see `rotary`.
    head_norms : weights [D] of the norm of each query and of each key, and epsilon, where a model
                 has them: heads are normed before they are rotated.
    """
    batch, twice, length, size = cache.shape
    kv = twice // 2
    x = qkv.view(batch, -1, heads + twice, size)
    tokens = x.shape[1]
    positions = position + torch.arange(tokens, device=cache.device)
    c, s = cos[positions][:, None], sin[positions][:, None]
    q, new = x[:, :, :heads], x[:, :, heads:]
    is_key = (torch.arange(twice, device=cache.device) < kv)[:, None]
    if head_norms is not None:
        of_queries, of_keys, epsilon = head_norms
        q = rms_norm(q.to(cos.dtype), of_queries, epsilon, cos.dtype)
        new = torch.where(is_key, rms_norm(new.to(cos.dtype), of_keys, epsilon, cos.dtype), new)
    q = rotary(q, c, s)
    new = rotary(new, torch.where(is_key, c, 1), torch.where(is_key, s, 0))
    new = new.transpose(1, 2).to(cache.dtype)
    cache[:, :, positions] = new

    if tokens > 1:
        k, v = (cache[:, :, : first + tokens] if first else new).split(kv, 1)
        y = of_prompt(q.transpose(1, 2).to(cache.dtype), k, v)
        return y.transpose(1, 2).reshape(batch * tokens, heads * size).to(dtype)
    q = q[:, 0].view(batch, kv, heads // kv, size)
    k, v = cache.split(kv, 1)
    scores = (q.to(k.dtype) @ k.transpose(-1, -2)).to(q.dtype)
    seen = torch.arange(length, device=cache.device) <= position
    shares = torch.where(seen, scores * size**-0.5, -torch.inf).softmax(-1)
    y = shares.to(v.dtype) @ v
    return y.reshape(batch, heads * size).to(dtype)


def of_prompt(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last queries [B, heads, T, D] of a prompt to its keys [B, kv, first + T, D],
    each to those up to its own."""
    gqa = q.shape[1] != k.shape[1]
    if q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler: 1.4 s

    mask = causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=gqa)


def argmax_of_rows(logits: Tensor) -> Tensor:
    """Index of the largest of each row, int64 [B], of logits [B, V]."""
    return logits.argmax(-1)


class Operations:
    """The functions of this module. mode: how they are run, for a record."""

    mode = "plain"
    swiglu_overlaps = False
    """Whether `swiglu` is a launch that overlaps with the product before it. If not, the activation
    pass of the next product computes it, where there is one (`model.Product.after_swiglu`)."""
    deferred: Any = None
    """A `deferred.DeferredNorms`, or None where each norm is a launch."""
    chains: Any = None
    """A `chained.Chains`, or None where each product is a launch."""
    expert_layers: Any = None
    """An `expert_layers.ExpertLayers`, or None where each product of experts is a launch."""

    rms_norm = staticmethod(rms_norm)
    add_and_norm = staticmethod(add_and_norm)
    attention = staticmethod(attention)
    swiglu = staticmethod(swiglu)
    argmax_of_rows = staticmethod(argmax_of_rows)

    def route(
        self, h: Tensor, y: Tensor, weight: Tensor, epsilon: float, dtype: Any, router: Tensor,
        chosen: int, normed: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """`add_and_norm`, and the experts of each token: (h, x, ids, shares), `choose_experts`.

        router: [E, width]; x times it are the logits of experts.
        """
        h, x = self.add_and_norm(h, y, weight, epsilon, dtype)
        return h, x, *choose_experts(F.linear(x.to(router.dtype), router), chosen, normed)


PLAIN: Final = Operations()
