"""Experts of a mixture as a layer of torch: `QuantExperts` over ggml's blocks, and `mul_mat_id`.

    from steps.nn.experts import QuantExperts

    layer = QuantExperts.from_float(module, "q4_0")         # Qwen3-MoE's, Mixtral's, gpt-oss's
    layer = QuantExperts(gate, up, down)                    # of (blocks, format) each
    layer = QuantExperts.from_gguf(gate, up, down)          # of a file's ffn_{gate,up,down}_exps
    y = layer(hidden_states, top_k_index, top_k_weights)    # as the experts of transformers

On a GPU a call is two products (`steps.product.experts`): gates and ups with silu(gate) * up, or
gpt-oss's clamped gate, at their end, and downs with the weighted sum over a token's experts. Gates
and ups in two formats, or another function, take a product more and torch's own operations between.
Nothing waits for the GPU, and a call may be captured into a CUDA graph once its number of tokens
has been used. On a CPU the experts in use are dequantized and torch multiplies, which is slow.

A number that is no expert's gives its token NaN. `check_ids` raises instead, where it is switched
on: it waits for the GPU.

Blocks stay in host memory; a GPU holds packed weights, as `steps.nn.linear` says. The operators
have no gradient. torch.compile sees each as one node.
"""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from qformats import FORMATS, quantize
from qformats.repack import byte_tiles, tiles
from steps.contract import array_dtype, known_accuracy
from steps.kernels.experts.contract import ExpertsRequest
from steps.kernels.experts.gates import ALPHA, LIMIT
from steps.nn import operator as operator
from steps.nn.kept import KeptWith
from steps.nn.linear import (
    TAKEN,
    _written_format,
    apply_past_buffers,
    cast,
    refused,
    said,
)
from steps.nn.shard import ExpertsShard, group_of
from steps.product.experts import choose, gates_and_ups, packed_arrays, prepare, require_product
from steps.product.prepared import Kept, Prepared
from steps.product.rows import row_width

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:
    torch = operator.torch
    Tensor, nn = torch.Tensor, torch.nn

IDS: Final = {torch.int32: "int32", torch.int64: "int64"}

check_ids = False
"""Whether every product looks whether its ids are those of experts, for which it waits for the
GPU: for debugging. A product that is captured or compiled is not checked."""


# --- products of experts on a GPU -----------------------------------------------------------------


def _on_gpu(
    x: Tensor,
    ids: Tensor,
    weights: list[Tensor],
    fast: list[Tensor],
    bias: Tensor | None,
    router: Tensor | None,
    format: str,
    experts: int,
    n: int,
    gate: str,
    leads: bool,
    follows: bool,
    dtype: torch.dtype,
) -> Tensor:
    """y [T, S, N] of x [T, K] or [T, S, K] and ids [T, S], see `steps.product.experts.experts`.

    weights: packed arrays. fast: those that fast kernels read, none where products are exact. gate:
    "" for none. router: y is [T, N] then. dtype: of y. Everything is on one GPU; what is not
    contiguous, or of a dtype that no kernel reads, is copied.
    """
    y = _shape_of(
        x, ids, weights, fast, bias, router, format, experts, n, gate, leads, follows, dtype
    )
    if not y.numel():
        return y
    k = x.shape[-1]
    of_bias, of_router = (_float(one) for one in (bias, router))
    names = [None if one is None else operator.NAMES[one.dtype] for one in (of_bias, of_router)]
    tokens, chosen = ids.shape
    request = ExpertsRequest(
        format, tokens, chosen, experts, n, k, operator.NAMES[x.dtype], operator.NAMES[y.dtype],
        IDS[ids.dtype], x.ndim == 3, names[0], gate or None, names[1], leads, follows,
        "fast" if fast else "exact",
    )  # fmt: skip
    with torch.cuda.device(x.device):
        made, reads_fast = _prepared.of(
            (request, x.get_device()), lambda: _loaded(request, weights, fast)
        )
        given = [operator._readable(x, x.dtype), y, *(fast if reads_fast else weights)]
        others = (ids.contiguous(), of_bias, of_router)
        operator.launch(made, [*given, *(one for one in others if one is not None)])
    return y


def _shape_of(
    x: Tensor, ids: Tensor, weights: list[Tensor], fast: list[Tensor], bias: Tensor | None,
    router: Tensor | None, format: str, experts: int, n: int, gate: str, leads: bool, follows: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    outputs = n // 2 if gate else n
    shape = (len(ids), outputs) if router is not None else (*ids.shape, outputs)
    return x.new_empty(shape, dtype=dtype)


_product = torch.library.custom_op(
    "quantized_gemm::experts", _on_gpu, mutates_args=(), device_types="cuda"
)
_product.register_fake(_shape_of)

_prepared: Kept[tuple[Prepared, bool]] = Kept(operator.PREPARED)


def _loaded(
    request: ExpertsRequest, weights: list[Tensor], fast: list[Tensor]
) -> tuple[Prepared, bool]:
    """The launches, and whether they read the fast arrays."""
    require_product(request)
    with operator._loading_allowed():
        choice = choose(request, operator._machine())
        reads_fast = choice.kernel.accuracy == "fast"
        arrays = operator.array_types(fast if reads_fast else weights)
        types = [(shape, array_dtype(dtype)) for shape, dtype in arrays]
        return prepare(choice, types), reads_fast


def _float(x: Tensor | None) -> Tensor | None:
    """As kernels read it: contiguous, in a dtype that they take."""
    if x is None:
        return None
    return (x if x.dtype in operator.NAMES else x.to(torch.float32)).contiguous()


def _check(ids: Tensor, experts: int) -> None:
    """ValueError for ids that are no expert's, where `check_ids` says so."""
    if not check_ids or torch.compiler.is_compiling():
        return
    if ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    wrong = ids[(ids < 0) | (ids >= experts)]
    if wrong.numel():
        raise ValueError(
            f"{wrong.numel()} ids are no expert's, such as {int(wrong[0])}: there are {experts}, "
            f"from 0 to {experts - 1}"
        )


def _packed(blocks: Tensor, format: str, device: Any, pack: Any = tiles) -> list[Tensor]:
    """The packed arrays of blocks, uint8 [E, N, bytes of a row], on a GPU."""
    fmt = FORMATS[format]
    host = operator.host_blocks(blocks.cpu().contiguous(), fmt)
    return [operator.upload(array, device) for array in packed_arrays(host, pack)]


# --- ggml's operation -----------------------------------------------------------------------------


@torch.library.custom_op("quantized_gemm::mul_mat_id", mutates_args=(), device_types="cpu")
def mul_mat_id(blocks: Tensor, x: Tensor, ids: Tensor, format: str, checked: bool = True) -> Tensor:
    """y[t, s] = x[t] @ dequantize(blocks[ids[t, s]])^T: every token by the experts chosen for it.

    blocks : uint8 [E, N, bytes of a row]. x: float32, float16 or bfloat16 [T, K], or [T, S, K] with
             a row for each slot. ids: int32 or int64 [T, S]; where one is not from 0 to E - 1,
             y[t, s] is NaN. checked: whether `check_ids` looks at them.

    Returns [T, S, N] in the dtype of x, on its device. A GPU keeps packed weights beside the blocks
    of a file, from the first call on and as long as these.
    """
    y = _products_of_experts(blocks, x, ids, format).fill_(nan)
    if checked:
        _check(ids, len(blocks))
    fmt, rows = FORMATS[format], x if x.ndim == 3 else x[:, None].expand(*ids.shape, -1)
    for expert in ids.unique().tolist():
        if 0 <= expert < len(blocks):
            chosen = ids == expert
            values = fmt.dequantize(operator.host_blocks(blocks[expert].contiguous(), fmt))
            product = rows[chosen].to(torch.float32) @ torch.from_numpy(values).T
            y[chosen] = product.to(x.dtype)
    return y


@mul_mat_id.register_kernel("cuda")
def _products_on_gpu(
    blocks: Tensor, x: Tensor, ids: Tensor, format: str, checked: bool = True
) -> Tensor:
    _products_of_experts(blocks, x, ids, format)
    weights = _of_blocks.of(blocks, format, lambda: _packed(blocks, format, x.device))
    if checked:
        _check(ids, len(blocks))
    size = format, len(blocks), blocks.shape[1]
    return _product(x, ids, weights, [], None, None, *size, "", False, False, x.dtype)


_of_blocks: KeptWith[list[Tensor]] = KeptWith()


@mul_mat_id.register_fake
def _products_of_experts(
    blocks: Tensor, x: Tensor, ids: Tensor, format: str, checked: bool = True
) -> Tensor:
    _, _, k = _matrices(blocks, format)
    if x.dtype not in operator.NAMES:
        raise TypeError(f"x must be float32, float16 or bfloat16, got {x.dtype}")
    slots = tuple(ids.shape)
    if len(slots) != 2 or tuple(x.shape) not in ((slots[0], k), (*slots, k)):
        raise ValueError(
            f"x must have shape [T, {k}] or [T, S, {k}] and ids [T, S], got {list(x.shape)} and "
            f"{list(ids.shape)}"
        )
    if ids.dtype not in IDS:
        raise TypeError(f"ids must be int32 or int64, got {ids.dtype}")
    return x.new_empty((*slots, blocks.shape[1]))


def _matrices(blocks: Tensor, format: str) -> tuple[int, int, int]:
    """(E, N, K) of blocks; TypeError or ValueError for what are none."""
    if format not in TAKEN:
        raise ValueError(f"format is {format!r}: it must be one of {', '.join(TAKEN)}")
    if blocks.dtype != torch.uint8 or blocks.ndim != 3:
        raise TypeError(
            f"blocks must be uint8 [E, N, bytes of a row], got {blocks.dtype} {list(blocks.shape)}"
        )
    return blocks.shape[0], blocks.shape[1], row_width(FORMATS[format], blocks.shape[2])


# --- the layer ------------------------------------------------------------------------------------

PARTS: Final = ("gate", "up", "down")


class QuantExperts(nn.Module):
    """The experts of a transformers model over ggml's blocks, called as its own are.

    gate, up, down : (blocks, format): uint8 [E, I, bytes of K], [E, I, bytes of K] and [E, K, bytes
                     of I].
    act_fn         : of gates, a module or function; "clamped" for gpt-oss's gate: gates up to 7,
                     ups from -7 to 7, gate * sigmoid(1.702 gate) * (up + 1).
    biases         : None, or (of gates [E, I], of ups [E, I], of downs [E, K]).
    accuracy       : "exact" or "fast", see `steps.product.experts.experts`. "fast" keeps a second
                     packing on a GPU.

    A state dict holds the blocks and their formats, as that of a `QuantLinear` does, and biases.
    Nothing has a gradient. Raises TypeError and ValueError for what are no blocks of such shapes.
    """

    _buffers: dict[str, Any]

    def __init__(
        self,
        gate: tuple[Tensor, str],
        up: tuple[Tensor, str],
        down: tuple[Tensor, str],
        act_fn: Callable[[Tensor], Tensor] | str = torch.nn.functional.silu,
        biases: tuple[Tensor, Tensor, Tensor] | None = None,
        *,
        accuracy: str = "exact",
    ) -> None:
        super().__init__()
        self.act_fn, self.accuracy = act_fn, known_accuracy(accuracy)
        self.sharding: ExpertsShard | None = None
        given = dict(zip(PARTS, (gate, up, down), strict=True))
        self.formats = {name: format for name, (_, format) in given.items()}
        sizes = {name: _matrices(*one) for name, one in given.items()}
        self.num_experts, self.inner, self.hidden = sizes["gate"]
        wanted = {"up": sizes["gate"], "down": (self.num_experts, self.hidden, self.inner)}
        for name, size in wanted.items():
            if sizes[name] != size:
                raise ValueError(
                    f"{name} has shape {list(sizes[name])} and gate {list(sizes['gate'])}: it must "
                    f"have {list(size)}"
                )
        for name, (blocks, _) in given.items():
            self.register_buffer(f"{name}_blocks", blocks)
        for name, bias in zip(PARTS, biases or (None, None, None), strict=True):
            rows = self.hidden if name == "down" else self.inner
            if bias is not None and tuple(bias.shape) != (self.num_experts, rows):
                raise ValueError(
                    f"the bias of {name} must have shape {[self.num_experts, rows]}, got "
                    f"{list(bias.shape)}"
                )
            made = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
            self.register_parameter(f"{name}_bias", made)
        where = gate[0].device
        if where.type == "cuda":
            self._move(where)

    @classmethod
    def from_float(
        cls, module: Any, format: str = "q4_0", *, accuracy: str = "exact"
    ) -> QuantExperts:
        """Quantize the experts of a transformers model: a module with `gate_up_proj` and
        `down_proj` as Qwen3-MoE and Mixtral have them, or gpt-oss. Raises ValueError for another
        module, with the reason."""
        if why := why_not(module, format):
            raise ValueError(f"{type(module).__name__}: {why}")
        gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
        if _is_transposed(module):
            both, down = gate_up.transpose(1, 2), down.transpose(1, 2)
            gate, up = both[:, ::2], both[:, 1::2]
        else:
            gate, up = gate_up.chunk(2, dim=1)
        gates, ups, downs = ((_quantized(w, format), format) for w in (gate, up, down))
        act_fn, biases = getattr(module, "act_fn", "clamped"), _biases(module)
        made = cls(gates, ups, downs, act_fn, biases, accuracy=accuracy)
        return made.train(module.training).to(gate_up.device)

    @classmethod
    def from_gguf(
        cls, gate: Any, up: Any, down: Any,
        act_fn: Callable[[Tensor], Tensor] | str = torch.nn.functional.silu, biases: Any = None,
        *, accuracy: str = "exact",
    ) -> QuantExperts:  # fmt: skip
        """Of tensors of a file (`qformats.gguf_file.Tensor`), on the CPU; blocks are copied.

        gate, up, down : ffn_gate_exps [E, I, K], ffn_up_exps [E, I, K], ffn_down_exps [E, K, I].
        act_fn, accuracy : see `QuantExperts`.
        biases : None, or the three tensors of biases of the file, or of torch.
        Raises ValueError for a type that no kernel takes, and for shapes that do not fit.
        """
        parts = []
        for tensor in (gate, up, down):
            if tensor.type not in TAKEN:
                raise ValueError(
                    f"{tensor.name} is {tensor.type} and the kernels take {', '.join(TAKEN)}"
                )
            if len(tensor.shape) != 3:
                raise ValueError(
                    f"{tensor.name} has shape {list(tensor.shape)}: experts are [E, N, K]"
                )
            array = np.array(tensor.array, order="C")
            parts.append((torch.from_numpy(array.view(np.uint8)), tensor.type))
        if biases is not None:
            biases = tuple(
                one if torch.is_tensor(one) else torch.from_numpy(np.array(one.values()))
                for one in biases
            )
        gates, ups, downs = parts
        return cls(gates, ups, downs, act_fn, biases, accuracy=accuracy)

    @classmethod
    def empty(cls, module: Any, formats: dict[str, str], accuracy: str = "exact") -> QuantExperts:
        """A layer without values in the place of experts of a transformers model, on the meta
        device; biases are the module's."""
        e, k, inner = _sizes(module)
        rows = {"gate": (inner, k), "up": (inner, k), "down": (k, inner)}
        parts = []
        for name in PARTS:
            fmt, (n, width) = FORMATS[formats[name]], rows[name]
            shape = e, n, width // fmt.elements * fmt.block_bytes
            made = torch.empty(shape, dtype=torch.uint8, device="meta")
            parts.append((made, fmt.name))
        gate, up, down = parts
        act_fn, biases = getattr(module, "act_fn", "clamped"), _biases(module)
        return cls(gate, up, down, act_fn, biases, accuracy=accuracy)

    def shard(self, mesh: Any, kind: str, *, unit: int | None = None) -> QuantExperts:
        """Keep this rank's share of the weights, in place; returns itself. All ranks call this with
        the same layer, and give it the same tokens. y is the sum of all ranks', whole.

        mesh : a DeviceMesh of one dimension, a process group, or None for all ranks.
        kind : "experts": the rank has some of the experts, and multiplies the slots that chose
               them. "rows": it has some of the rows of all gates and ups, and the same columns of
               all downs, so that ranks have equal work whatever tokens choose.
        unit : of "rows": how many rows stay together, by default the downs' block.

        Sums and state dicts are as of `QuantLinear.shard`. A bias of downs is added by one rank.
        ValueError where ranks cannot share the layer, with the numbers.
        """
        if self.sharding is not None:
            raise ValueError(f"the layer is split already: {self.sharding}")
        block = FORMATS[self.formats["down"]].elements
        unit = block if unit is None else unit
        if unit < 1 or unit % block:
            raise ValueError(
                f"unit={unit} cuts blocks of {self.formats['down']}: use a multiple of {block}"
            )
        size = self.num_experts, self.hidden, self.inner
        shard = ExpertsShard(group_of(mesh), kind, *size, unit)
        here = self.device
        for name in PARTS:
            key = f"{name}_blocks"
            self._buffers[key] = shard.share(name, self._buffers[key])
            if (bias := self._parameters[f"{name}_bias"]) is not None:
                own = nn.Parameter(shard.share(name, bias.detach()), requires_grad=False)
                self._parameters[f"{name}_bias"] = own
        self.sharding, self.inner = shard, shard.own_inner
        self.num_experts = shard.own[1] - shard.own[0]
        if self._on_gpu:
            self._move(here)
        return self

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, K] of tokens [T, K], of their experts [T, S] and of the experts' weights [T, S]."""
        x, ids, shard = hidden_states, top_k_index, self.sharding
        _check(ids, self.num_experts if shard is None else shard.experts)
        if shard is None:
            return self._mixed(x, ids, top_k_weights, False)
        sums = shard.sums(self.device)
        few = sums.is_small(x.numel())
        if shard.kind == "rows":
            return sums(self._mixed(x, ids, top_k_weights, few)).to(x.dtype)
        first, last = shard.own
        elsewhere = (ids >= 0) & (ids < shard.experts) & ((ids < first) | (ids >= last))
        ids = torch.where((ids < first) | (ids >= last), -1, ids - first)
        y = self._mixed(x, ids, None, few).to(torch.float32)
        y = torch.where(elsewhere.unsqueeze(-1), 0, y * top_k_weights.unsqueeze(-1)).sum(1)
        return sums(y if few else y.to(x.dtype)).to(x.dtype)

    def _mixed(self, x: Tensor, ids: Tensor, router: Tensor | None, wide: bool) -> Tensor:
        """The layer's own experts: [T, K], or without a router's weights [T, S, K]. wide: in
        float32, else in the dtype of x."""
        if not self._on_gpu:
            return self._on_cpu(x, ids, router, wide)
        dtype = torch.float32 if wide else x.dtype
        if fused := bool(self._arrays("gate_up")):
            of_gates = x.dtype
            if self._gate == "clamped" and x.dtype is torch.bfloat16:
                of_gates = torch.float16  # 56 at most, and no pass is needed before the downs
            x = self._launched("gate_up", x, ids, of_gates, gate=self._gate, leads=True)
        else:
            gate, up = (self._launched(name, x, ids, x.dtype) for name in PARTS[:2])
            x = self._gated(gate, up).to(x.dtype)
        return self._launched("down", x, ids, dtype, router, follows=fused)

    def _launched(
        self, name: str, x: Tensor, ids: Tensor, dtype: torch.dtype, router: Tensor | None = None,
        gate: str = "", leads: bool = False, follows: bool = False,
    ) -> Tensor:  # fmt: skip
        n = {"gate_up": 2 * self.inner, "down": self.hidden}.get(name, self.inner)
        return _product(
            x, ids, self._arrays(name), self._arrays(f"{name}_fast"), self._bias(name), router,
            self.formats["gate" if gate else name], self.num_experts, n, gate, leads, follows,
            dtype,
        )  # fmt: skip

    def _on_cpu(self, x: Tensor, ids: Tensor, router: Tensor | None, wide: bool) -> Tensor:
        parts = {}
        for name in PARTS[:2]:
            y = mul_mat_id(self._buffers[f"{name}_blocks"], x, ids, self.formats[name], False)
            parts[name] = self._with_bias(y, name, ids)
        dtype = torch.float32 if wide else x.dtype
        hidden = self._gated(**parts).to(x.dtype).to(dtype)
        y = mul_mat_id(self._buffers["down_blocks"], hidden, ids, self.formats["down"], False)
        y = self._with_bias(y, "down", ids)
        return (y if router is None else (y * router.unsqueeze(-1)).sum(1)).to(dtype)

    def _with_bias(self, y: Tensor, name: str, ids: Tensor) -> Tensor:
        bias = self._bias(name)
        return y if bias is None else y + bias[ids.clamp(0, self.num_experts - 1)].to(y.dtype)

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        if isinstance(self.act_fn, str):
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
            return gate * torch.sigmoid(ALPHA * gate) * (up + 1)
        return self.act_fn(gate) * up

    @property
    def _gate(self) -> str:
        """The gate that a kernel has for `act_fn`; "" for none."""
        if isinstance(self.act_fn, str):
            return self.act_fn
        silu = self.act_fn is torch.nn.functional.silu or isinstance(self.act_fn, nn.SiLU)
        return "silu" if silu or type(self.act_fn).__name__ == "SiLUActivation" else ""

    # --- state ---

    def get_extra_state(self) -> Tensor:
        """The formats and version of the blocks, see `QuantLinear.get_extra_state`."""
        return torch.tensor(list(said(self._formats()).encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """Raises ValueError for blocks of other formats or of another version."""
        if (why := refused(state, self._formats())) is not None:
            raise ValueError(why)

    def _formats(self) -> str:
        return ", ".join(f"{name} {one}" for name, one in self.formats.items())

    def extra_repr(self) -> str:
        accuracy = "" if self.accuracy == "exact" else f", accuracy={self.accuracy}"
        sharding = f", {self.sharding}" if self.sharding else ""
        return f"{self.num_experts}, {self._formats()}{accuracy}{sharding}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.sharding is not None:
            for key, name in self._shared(prefix):
                if key in destination:
                    destination[key] = self.sharding.whole(name, destination[key])

    @staticmethod
    def _shared(prefix: str) -> list[tuple[str, str]]:
        """(key of a state dict, name of the part) of what ranks share."""
        return [(f"{prefix}{name}_{of}", name) for name in PARTS for of in ("blocks", "bias")]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        """Blocks that are no bytes are an error of `load_state_dict`, and not loaded. Where the
        layer is on a GPU they are packed again."""
        if why := cast(state_dict, prefix, [f"{name}_blocks" for name in PARTS]):
            others[-1].append(why)
            return
        if (shard := self.sharding) is not None:
            state_dict = {key: one for key, one in state_dict.items() if key.startswith(prefix)}
            for key, name in self._shared(prefix):
                if (one := state_dict.get(key)) is None:
                    continue
                n = shard.hidden if name == "down" else shard.inner
                if tuple(one.shape[:2]) != (shard.experts, n):
                    others[-1].append(
                        f"{key} has shape {list(one.shape)}, and the whole layer has {n} rows of "
                        f"{shard.experts} experts: state dicts are whole where ranks share a layer"
                    )
                    return
                state_dict[key] = shard.share(name, one)
        super()._load_from_state_dict(state_dict, prefix, *others)
        if self._on_gpu:
            self._pack(self.device)

    # --- memory ---

    @property
    def _on_gpu(self) -> bool:
        return "down_0" in self._buffers

    @property
    def device(self) -> Any:
        """The device that tokens must be on."""
        return (self._buffers.get("down_0", self._buffers["down_blocks"])).device

    @property
    def device_bytes(self) -> int:
        """Bytes of the weights on the layer's device."""
        names = [name + fast for name in ("gate_up", *PARTS) for fast in ("", "_fast")]
        arrays = [one for name in names for one in self._arrays(name)]
        arrays = arrays or [self._buffers[f"{name}_blocks"] for name in PARTS]
        return sum(one.nbytes for one in arrays)

    def _arrays(self, name: str) -> list[Tensor]:
        """The packed arrays of a part on a GPU, or none."""
        return [self._buffers[f"{name}_{i}"] for i in range(2) if f"{name}_{i}" in self._buffers]

    def _bias(self, name: str) -> Tensor | None:
        if name == "gate_up":
            return self._buffers.get("gate_up_bias")
        if name == "down" and self.sharding is not None and not self.sharding.adds_biases:
            return None
        return self._parameters[f"{name}_bias"]

    def _move(self, device: Any) -> None:
        """Make the packed weights that a GPU needs from the blocks, or drop them."""
        blocks = {f"{name}_blocks": self._buffers[f"{name}_blocks"] for name in PARTS}
        self._buffers.clear()
        self._buffers.update(blocks)
        if device.type not in ("cuda", "cpu", "meta"):
            raise ValueError(f"experts are multiplied on cuda and on cpu, not on {device}")
        if device.type != "cuda":
            for name, one in blocks.items():
                moved = one.is_meta and device.type != "meta"
                self._buffers[name] = (
                    torch.zeros_like(one, device=device) if moved else one.to(device)
                )
            return
        for name, one in blocks.items():
            self._buffers[name] = one.cpu()
        self._pack(device)

    def _pack(self, device: Any) -> None:
        gate, up, down = (self._buffers[f"{name}_blocks"] for name in PARTS)
        if self.formats["gate"] == self.formats["up"] and self._gate:
            both = gates_and_ups(gate, up)
            self._upload("gate_up", both, self.formats["gate"], device)
            if self.gate_bias is not None:
                bias = gates_and_ups(self.gate_bias.detach(), self.up_bias.detach())
                self.register_buffer("gate_up_bias", bias, persistent=False)
        else:
            self._upload("gate", gate, self.formats["gate"], device)
            self._upload("up", up, self.formats["up"], device)
        self._upload("down", down, self.formats["down"], device)

    def _upload(self, name: str, blocks: Tensor, format: str, device: Any) -> None:
        packings = {name: tiles, f"{name}_fast": byte_tiles}
        for one, pack in list(packings.items())[: 1 if self.accuracy == "exact" else 2]:
            for i, array in enumerate(_packed(blocks, format, device, pack)):
                self.register_buffer(f"{one}_{i}", array, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantExperts:
        """.to(), .half(), .cuda() and their like: they move and cast biases. Blocks keep their
        dtype, and packed weights are made where the layer moves to a GPU."""
        here, there = apply_past_buffers(self, fn, recurse)
        if there != here or "gate_up_bias" in self._buffers:
            self._move(there)
        return self


def _is_transposed(module: Any) -> bool:
    """Whether its matrices are [E, K, N], with gates and ups in turn, as gpt-oss has them."""
    return hasattr(module, "gate_up_proj_bias")


def _biases(module: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Those of gates, ups and downs; None where there are none."""
    if not _is_transposed(module):
        return None
    both, down = module.gate_up_proj_bias.detach(), module.down_proj_bias.detach()
    return both[:, ::2].contiguous(), both[:, 1::2].contiguous(), down


def _sizes(module: Any) -> tuple[int, int, int]:
    """(E, K, I)"""
    e, a, b = module.gate_up_proj.shape
    return (e, a, b // 2) if _is_transposed(module) else (e, b, a // 2)


def why_not(module: Any, format: str) -> str | None:
    """None for the experts of a transformers model that `QuantExperts.from_float` takes, else why
    it does not."""
    fmt = _written_format(format)
    gate_up: Any = getattr(module, "gate_up_proj", None)
    down: Any = getattr(module, "down_proj", None)
    if not (torch.is_tensor(gate_up) and torch.is_tensor(down) and gate_up.ndim == down.ndim == 3):
        return "it has no gate_up_proj and down_proj of three dimensions"
    if gate_up.is_meta:
        return "its weights are on the meta device, without values: load them"
    e, k, inner = _sizes(module)
    wanted = (e, inner, k) if _is_transposed(module) else (e, k, inner)
    if tuple(down.shape) != wanted:
        return f"gate_up_proj is {list(gate_up.shape)} and down_proj {list(down.shape)}"
    if _is_transposed(module):
        if (getattr(module, "alpha", None), getattr(module, "limit", None)) != (ALPHA, LIMIT):
            return f"its gate is not gpt-oss's, of alpha {ALPHA} and limit {LIMIT}"
    elif not callable(getattr(module, "act_fn", None)):
        return "it has no act_fn"
    for name, size in (("K", k), ("I", inner)):
        if size % fmt.elements:
            return f"{name}={size} is not a multiple of {fmt.elements}, the block of {fmt.name}"
    return None


def _quantized(weight: Tensor, format: str) -> Tensor:
    """Blocks, uint8 [E, N, bytes of a row], of float weights [E, N, K], one expert at a time."""
    made = []
    for one in weight:
        values = one.to("cpu", torch.float32).contiguous().numpy()
        made.append(quantize(values, format).view(np.uint8).reshape(len(values), -1))
    return torch.from_numpy(np.stack(made))
