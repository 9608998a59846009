"""Rows of quantized weights as operators of torch, and an embedding made of them.

    from steps.nn.rows import QuantEmbedding, dequantize, get_rows

    dequantize(blocks, "q4_k", torch.float16)       # [N, K] of uint8 [N, bytes of a row]
    get_rows(blocks, ids, "q4_k", torch.float16)    # [..., K] of ids [...]

Blocks are ggml's own bytes, on the CPU or on a GPU. Every value is that of `qformats.dequantize`,
rounded once to the dtype; on a GPU by one kernel (`steps.kernels.rows`), on a CPU by the codec. The
operators have no gradient. torch.compile sees each as one node.

`QuantEmbedding` keeps these bytes and nothing else, wherever they are.
"""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING, Any

from qformats import FORMATS, Format
from steps.nn import operator as operator
from steps.nn.linear import TAKEN, cast, refused, said
from steps.nn.weight import Weight, refuse
from steps.product.rows import prepared, row_width

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:
    torch = operator.torch
    Tensor, nn = torch.Tensor, torch.nn

IDS = (torch.int32, torch.int64)


@torch.library.custom_op("quantized_gemm::dequantize_rows", mutates_args=(), device_types="cpu")
def dequantize(blocks: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """The weights [N, K] of blocks, uint8 [N, bytes of a row], on their device, float32, float16 or
    bfloat16. Raises TypeError and ValueError for what are no blocks of the format."""
    _, _, fmt = _facts(blocks, format, dtype)
    values = fmt.dequantize(operator.host_blocks(blocks.contiguous(), fmt))
    return torch.from_numpy(values).to(dtype)


@torch.library.custom_op("quantized_gemm::get_rows", mutates_args=(), device_types="cpu")
def get_rows(blocks: Tensor, ids: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """The rows [..., K] of blocks [N, bytes of a row] that ids [...], int32 or int64 on the same
    device, name. A row whose id is not one from 0 to N - 1 is NaN."""
    n, k, fmt = _facts(blocks, format, dtype)
    _require_ids(ids, blocks)
    flat = ids.reshape(-1)
    known = (flat >= 0) & (flat < n)
    rows = torch.full((flat.numel(), k), nan, dtype=dtype)
    if known.any():
        taken = blocks[flat[known]].contiguous()
        rows[known] = torch.from_numpy(fmt.dequantize(operator.host_blocks(taken, fmt))).to(dtype)
    return rows.reshape(*ids.shape, k)


@dequantize.register_kernel("cuda")
def _dequantize_on_gpu(blocks: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    n, k, fmt = _facts(blocks, format, dtype)
    return _launched(blocks, None, fmt, blocks.new_empty((n, k), dtype=dtype))


@get_rows.register_kernel("cuda")
def _get_rows_on_gpu(blocks: Tensor, ids: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    _, k, fmt = _facts(blocks, format, dtype)
    _require_ids(ids, blocks)
    rows = blocks.new_empty((ids.numel(), k), dtype=dtype)
    return _launched(blocks, ids.reshape(-1).contiguous(), fmt, rows).reshape(*ids.shape, k)


@dequantize.register_fake
def _shape_of_weights(blocks: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    n, k, _ = _facts(blocks, format, dtype)
    return blocks.new_empty((n, k), dtype=dtype)


@get_rows.register_fake
def _shape_of_rows(blocks: Tensor, ids: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    _, k, _ = _facts(blocks, format, dtype)
    _require_ids(ids, blocks)
    return blocks.new_empty((*ids.shape, k), dtype=dtype)


def _launched(blocks: Tensor, ids: Tensor | None, fmt: Format, rows: Tensor) -> Tensor:
    """The rows, when the kernel that fills them is queued on the current stream of their GPU."""
    if not rows.numel():
        return rows
    device, held = rows.get_device(), blocks.contiguous()
    if held.data_ptr() % 2:  # kernels read float16 in it
        held = held.clone()
    arrays = [held.view(-1), rows] + ([] if ids is None else [ids])
    with torch.cuda.device(device), operator._loading_allowed():
        made = prepared(fmt.name, operator.array_types(arrays), device)
    operator.launch(made, arrays)
    return rows


def _facts(blocks: Tensor, format: str, dtype: Any) -> tuple[int, int, Format]:
    """(N, K, format) of blocks; TypeError or ValueError for what cannot be dequantized."""
    if format not in TAKEN:
        raise ValueError(f"format is {format!r}: it must be one of {', '.join(TAKEN)}")
    if dtype not in operator.NAMES:
        raise TypeError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
    if blocks.dtype != torch.uint8 or blocks.ndim != 2:
        raise TypeError(
            f"blocks must be uint8 [N, bytes of a row], got {blocks.dtype} {list(blocks.shape)}"
        )
    fmt = FORMATS[format]
    return blocks.shape[0], row_width(fmt, blocks.shape[1]), fmt


def _require_ids(ids: Tensor, blocks: Tensor) -> None:
    if ids.dtype not in IDS or ids.device != blocks.device:
        raise TypeError(
            f"ids must be int32 or int64 on {blocks.device}, got {ids.dtype} on {ids.device}"
        )


class QuantEmbedding(nn.Embedding):
    """A `torch.nn.Embedding` over ggml's blocks: rows [..., K] of ids [...].

    It is one, so that code which looks for embeddings finds it, such as PEFT. Its `weight` [V, K]
    is no Parameter but a read-only tensor that is dequantized when it is used, without the scale
    (`steps.nn.weight`); a layer that computes with it does so in floats.

    blocks : uint8 [V, bytes of a row], where the layer is, taken as they are.
    format : a name of `qformats.FORMATS`.
    dtype  : of the rows; `.to(dtype)` and its like change it.
    scale  : None, or what rows are multiplied by, as Gemma does: a tensor without dimensions, which
             is rounded to the dtype first.

    An id that is not in the table gives a row of NaN. A state dict holds the blocks and their
    format, as that of a `QuantLinear` does. Nothing has a gradient.
    """

    def __init__(
        self, blocks: Tensor, format: str, dtype: Any, scale: Tensor | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim, _ = _facts(blocks, format, dtype)
        self.padding_idx = self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False
        self.format = format
        self.register_buffer("blocks", blocks)
        self.register_buffer("embed_scale", scale, persistent=False)  # Gemma's name, for adapters
        self.register_buffer("_of_dtype", blocks.new_empty(0, dtype=dtype), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        rows = get_rows(self.blocks, ids, self.format, self._of_dtype.dtype)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The table [V, K] in the dtype of rows, read-only, dequantized when it is used."""
        dtype = self._of_dtype.dtype
        if torch.compiler.is_compiling():
            return dequantize(self.blocks, self.format, dtype)
        shape = self.num_embeddings, self.embedding_dim
        return Weight(
            torch.empty(shape, dtype=dtype, device="meta"),
            self.blocks.device,
            lambda: dequantize(self.blocks, self.format, dtype),
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            refuse("an assignment")
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        scale = "" if self.embed_scale is None else f", scale={self.embed_scale.item():g}"
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format}{scale}"

    def get_extra_state(self) -> Tensor:
        """The format and version of the blocks, see `QuantLinear.get_extra_state`."""
        return torch.tensor(list(said(self.format).encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """Raises ValueError for blocks of another format or version."""
        if (why := refused(state, self.format)) is not None:
            raise ValueError(why)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        """Blocks that are no bytes are an error of `load_state_dict`, and not loaded."""
        if why := cast(state_dict, prefix, ("blocks",)):
            others[-1].append(why)
            return
        super()._load_from_state_dict(state_dict, prefix, *others)
