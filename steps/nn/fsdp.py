"""FSDP2 over quantized layers: each rank holds its share of the blocks.

    from torch.distributed.fsdp import fully_shard
    from steps.nn.fsdp import shard_blocks

    for layer in model.model.layers:                # one after another: a GPU never holds all
        fully_shard(shard_blocks(layer.to("cuda")))
    fully_shard(shard_blocks(model.to("cuda")))

`fully_shard` shards parameters, and blocks are buffers, of which every rank would keep all.
`shard_blocks` makes Parameters of them, of bytes and without a gradient. torch then cuts them, and
gathers them for the time of a module's forward and of its backward, as it does with any other.

Memory. On a GPU the Parameters are the packed weights. The blocks, which a state dict has, stay in
host memory: each rank keeps its rows. On a CPU the Parameters are the blocks, and of an embedding
they are everywhere. Experts are refused.

State dicts have `blocks` as a DTensor of all rows, as they have other parameters (on a GPU copies
there), so `torch.distributed.checkpoint.state_dict` saves and loads shares or whole ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from qformats import FORMATS
from steps.nn import operator as operator
from steps.nn.experts import QuantExperts
from steps.nn.linear import BLOCKS, QuantLinear
from steps.nn.rows import QuantEmbedding
from steps.product.choice import packings
from steps.product.operands import weight_format

torch = operator.torch
if TYPE_CHECKING:
    from torch import Tensor, nn
else:
    Tensor, nn = torch.Tensor, torch.nn

FIRST_TORCH: Final = "2.13"  # whose fully_shard takes Parameters of integers (its issue 177844)

DTensor: Final = import_module("torch.distributed.tensor").DTensor


def shard_blocks(model: Any) -> Any:
    """Let torch's `fully_shard(model)` shard the blocks of quantized layers; returns the model.

    Call it where the layers are on the device of the mesh, before `fully_shard` of each module that
    is given to it. From then on a layer stays on its device. Raises ValueError for layers on the
    meta device, for those that ranks share already (`QuantLinear.shard`), and for experts, and
    RuntimeError where torch is older than 2.13: its fully_shard takes floats alone.
    """
    if too_old():
        raise RuntimeError(
            f"fully_shard of torch {torch.__version__} shards floats alone, and blocks are bytes: "
            f"take torch {FIRST_TORCH} or later"
        )
    for name, layer in model.named_modules():
        if isinstance(layer, ShardedLinear):
            continue
        if isinstance(layer, QuantLinear):
            if layer.sharding is not None:
                raise ValueError(f"{name} is split already: {layer.sharding}")
            if layer.device.type == "meta":
                raise ValueError(f"{name} is on the meta device, without blocks: load them first")
            layer.__class__ = ShardedLinear
            layer._as_parameters()
        elif isinstance(layer, QuantExperts):
            raise ValueError(
                f"{name} holds experts, whose blocks fully_shard cannot share: keep them out of "
                "the modules that it is given"
            )
        elif isinstance(layer, QuantEmbedding) and BLOCKS in layer._buffers:
            _to_parameter(layer, BLOCKS, layer._buffers.pop(BLOCKS))
    return model


def too_old() -> bool:
    """Whether this torch's fully_shard refuses integers."""
    return bool(torch.torch_version.TorchVersion(torch.__version__) < FIRST_TORCH)


def _to_parameter(module: Any, name: str, held: Any) -> None:
    module.register_parameter(name, nn.Parameter(held, requires_grad=False))


class ShardedLinear(QuantLinear):
    """What `shard_blocks` makes of a `QuantLinear`: its arrays are Parameters that torch shards."""

    def _as_parameters(self) -> None:
        self.arrays: dict[str, tuple[Any, Any]] = {}
        """Of the packed arrays: dtype and shape. Their Parameters are flat bytes, as torch cuts the
        first dimension."""
        self.rows: Tensor | None = None
        """On a GPU: the blocks, all of them until torch has cut the arrays, then this rank's."""
        buffers = dict(self._buffers)
        self._buffers.clear()
        if not self.packings:
            _to_parameter(self, BLOCKS, buffers[BLOCKS])
            return
        self.rows = buffers.pop(BLOCKS)
        for name, array in buffers.items():
            self.arrays[name] = array.dtype, array.shape
            _to_parameter(self, name, array.view(-1).view(torch.uint8))
        self._non_persistent_buffers_set.update(self.arrays)  # in no state dict

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weights_0" and self._is_share(value):  # torch has just cut it
            self._keep_own_rows()

    def _is_share(self, held: Any) -> bool:
        return isinstance(held, DTensor)

    def _arrays(self, kind: str) -> list[Tensor]:
        found = []
        for name, (dtype, shape) in self.arrays.items():
            if name.startswith(kind):
                found.append(self._whole(self._parameters[name]).view(dtype).view(shape))
        return found

    def _whole(self, held: Any) -> Tensor:
        if self._is_share(held):
            raise RuntimeError(
                "ranks share the blocks of this layer, and each has all of them only in the "
                "forward and backward of the module that fully_shard was given: call that, or its "
                "unshard() before"
            )
        whole: Tensor = held
        return whole

    def _product(self, x: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
        if not self.arrays:
            self._whole(self._parameters[BLOCKS])
        return super()._product(x, bias, wide=wide)

    @property
    def unpacked_from(self) -> tuple[Any, ...]:
        """As of a `QuantLinear`, where this rank has all blocks, see `_whole`."""
        if not self.arrays:
            self._whole(self._parameters[BLOCKS])
        return super().unpacked_from

    @property
    def device(self) -> Any:
        return next(iter(self._shares().values())).device

    @property
    def device_bytes(self) -> int:
        """Of all ranks together."""
        return sum(one.nbytes for one in self._shares().values())

    def _shares(self) -> dict[str, Any]:
        """The Parameters of blocks, by name: shares, or whole ones while they are gathered."""
        return {name: self._parameters[name] for name in self.arrays or (BLOCKS,)}

    def shard(self, mesh: Any, kind: str, **options: Any) -> QuantLinear:
        """ValueError: `fully_shard` splits it already."""
        raise ValueError("fully_shard splits the layer: split it by shard() before shard_blocks()")

    def _move(self, device: Any) -> None:
        raise ValueError(
            f"the layer is prepared for fully_shard on {self.device} and cannot move to {device}: "
            "move it before shard_blocks"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> QuantLinear:
        here = self.device
        nn.Module._apply(self, fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=here)).dtype
        if self.device != here:
            self._move(self.device)
        return self

    # --- state dicts, of a layer on a GPU -----------------------------------------------------

    def _keep_own_rows(self) -> None:
        if self.rows is not None and len(self.rows) == self.out_features:
            self.rows = self._own(self.rows).clone()

    def _own(self, whole: Tensor) -> Tensor:
        """This rank's part of the first dimension, as torch cuts it; all where it has not."""
        held = next(iter(self._shares().values()))
        for axis, placement in enumerate(getattr(held, "placements", ())):
            if placement.is_shard():
                ranks, rank = held.device_mesh.size(axis), held.device_mesh.get_local_rank(axis)
                size = -(-len(whole) // ranks)
                return whole[rank * size : (rank + 1) * size]
        return whole

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.rows is None:
            return
        for name in self.arrays:
            del destination[prefix + name]
        destination[prefix + BLOCKS] = self.blocks

    def __getattr__(self, name: str) -> Any:
        """On a GPU the blocks are no buffer, which fully_shard would move there."""
        if name == BLOCKS and self.__dict__.get("rows") is not None:
            return self._all_rows()
        return super().__getattr__(name)

    def _all_rows(self) -> Any:
        """The blocks as a state dict has them: where ranks share them a DTensor, a copy on the
        GPU."""
        assert self.rows is not None
        held, shape = next(iter(self._shares().values())), (self.out_features, self.rows.shape[1])
        if not self._is_share(held):
            return self.rows
        return DTensor.from_local(
            self.rows, held.device_mesh, held.placements, run_check=False, shape=shape,
            stride=(shape[1], 1),
        )  # fmt: skip

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[Any]:
        """Of this module alone with the blocks, once they are shared: for what saves checkpoints,
        which asks so. The names of all buffers must not change by fully_shard."""
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        shared = self.rows is not None and self._is_share(next(iter(self._shares().values())))
        if shared and not recurse:
            yield f"{prefix}.{BLOCKS}".lstrip("."), self._all_rows()

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """On a GPU every rank packs all rows and keeps its share of them."""
        if self.rows is None:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys,
                error_msgs,
            )  # fmt: skip
            return
        key = prefix + BLOCKS
        if (given := state_dict.get(key)) is None:
            missing_keys += [key] * strict
        elif (why := self._refused(state_dict, prefix) or self._loaded(given, key)) is not None:
            error_msgs.append(why)
        missing: list[str] = []
        rest = {name: one for name, one in state_dict.items() if name != key}
        nn.Module._load_from_state_dict(
            self, rest, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs
        )
        own = {prefix + name for name in self.arrays}
        missing_keys += [one for one in missing if one not in own]

    def _loaded(self, given: Any, key: str) -> str | None:
        """Take the blocks; else why not."""
        assert self.rows is not None
        shape = self.out_features, self.rows.shape[1]
        if tuple(given.shape) != shape:
            return f"{key} has shape {list(given.shape)}, and the layer has {list(shape)}"
        whole = given.full_tensor() if self._is_share(given) else given
        blocks = whole.detach().to("cpu", torch.uint8).contiguous()
        try:
            weight_format(operator.host_blocks(blocks, FORMATS[self.format]))
        except ValueError as error:
            return f"{key}: {error}"
        capability = operator.capability(self.device)
        steps = packings(self.format, capability, self.accuracy, self.in_features)
        for name, array in self._packed_by(steps, blocks):
            held = self._parameters[name]
            local = held.to_local() if self._is_share(held) else held
            packed = torch.from_numpy(array).reshape(-1).view(torch.uint8)
            local.detach().copy_(self._own(packed))
        self.rows = self._own(blocks).clone()
        return None
