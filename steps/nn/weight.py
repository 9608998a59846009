"""`weight` of a `QuantLinear` or `QuantEmbedding`: a tensor of which shape, dtype and device are
known, and values on use.

Code that asks a layer for its weight mostly wants the dtype or the device, or hands it to
`torch.nn.functional.linear`, for which the layer's own product stands in. All other operations get
the dequantized matrix, a new one each time, so what is written to it would be lost: writing raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

TO_HOST: Final = (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__reduce_ex__)
"""Methods that read memory, past torch's dispatcher."""

ALIASES: Final = (Tensor.data.__get__, Tensor.detach)  # type: ignore[attr-defined]


def refuse(what: str) -> Any:
    raise RuntimeError(
        f"{what}: the weight of a QuantLinear is read-only, as that of a QuantEmbedding: they hold "
        "quantized blocks; make a layer of other weights by QuantLinear.from_float, and merge "
        "adapters by steps.nn.adapters.merge_adapters"
    )


class Weight(Tensor):
    """The weights [N, K] of a layer, or a view of them, read-only and without memory.

    make    : makes them, a tensor of this shape, dtype and device.
    product : (x, bias) -> x @ W^T + bias, of the layer; None for a view.
    """

    make: Callable[[], Tensor]
    product: Callable[[Tensor, Tensor | None], Tensor] | None

    @staticmethod
    def __new__(
        cls: type[Weight],
        like: Tensor,
        device: Any,
        make: Callable[[], Tensor],
        product: Callable[[Tensor, Tensor | None], Tensor] | None = None,
    ) -> Weight:
        made: Weight = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        made.make, made.product = make, product
        return made

    def __init__(self, *_: Any) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Weight({list(self.shape)}, {self.dtype}, {self.device}, read-only)"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            names = ("input", "weight", "bias")[len(args) :]
            x, weight, bias = (*args, *(kwargs.get(name) for name in names))
            if isinstance(weight, Weight) and weight.product and not isinstance(x, Weight):
                return weight.product(x, bias)
        if getattr(func, "__name__", "") == "__set__" or func is Tensor.__setitem__:
            return refuse("an assignment")
        if func is Tensor.requires_grad_ and all(args[1:]) and all(kwargs.values()):
            return refuse("requires_grad_")
        if func in ALIASES:
            return args[0]
        if func in TO_HOST:
            return func(args[0].make(), *args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.make()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return args[0]
        for argument, given in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and any(isinstance(one, Weight) for one in tree_leaves(given)):
                refuse(func._schema.name)
        if isinstance(kwargs.get("out"), Weight):
            refuse(func._schema.name)
        if func.is_view and isinstance(args[0], Weight):
            whole, rest = args[0], args[1:]
            like = torch.empty_strided(
                whole.shape, whole.stride(), dtype=whole.dtype, device="meta"
            )
            views = func(like, *rest, **kwargs)
            if isinstance(views, Tensor):
                return Weight(views, whole.device, lambda: func(whole.make(), *rest, **kwargs))
            return [
                Weight(one, whole.device, lambda i=i: func(whole.make(), *rest, **kwargs)[i])
                for i, one in enumerate(views)
            ]
        args, kwargs = tree_map_only(Weight, lambda one: one.make(), (args, kwargs))
        return func(*args, **kwargs)
