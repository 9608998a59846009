"""The kernels that transformers asks for where it keeps a GGUF file packed: those of this project.

    from steps.nn.ggml_kernels import register

    register()                      # before from_pretrained(..., gguf_file="model.gguf")

Registered, transformers' `GgufLinear`, `GgufEmbedding` and `GgufExperts` keep the file's blocks and
call what is here, on a GPU and on a CPU; without kernels it makes float weights of the whole file.

They call `mul_mat_vec` for up to 8 tokens, whose packed weights are made at the first call and kept
as long as the blocks: a GPU then has both, and more tokens take a float matrix at each call.
`steps.nn.gguf.use_gguf` makes `QuantLinear` of these layers, which have the packed weights alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from qformats.gguf_file import GGML_TYPES
from steps.nn import experts, rows
from steps.nn import operator as operator
from steps.nn.kept import KeptWith
from steps.nn.linear import QuantLinear

torch = operator.torch
if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = torch.Tensor

GEMV_TYPES: Final = frozenset(GGML_TYPES)
"""ggml's numbers of the types that are multiplied."""


def format_of(ggml_type: int) -> str:
    """The format of one of ggml's types; ValueError for those that no kernel takes."""
    if ggml_type not in GGML_TYPES:
        raise ValueError(
            f"ggml type {ggml_type} is none that is multiplied here: these are "
            f"{', '.join(f'{name} ({one})' for one, name in GGML_TYPES.items())}"
        )
    return GGML_TYPES[ggml_type]


@torch.library.custom_op("quantized_gemm::mul_mat_vec", mutates_args=(), device_types="cpu")
def _product(weight: Tensor, x: Tensor, format: str) -> Tensor:
    n, k, _ = rows._facts(weight, format, x.dtype)
    return operator.product(x, None, weight, [], [], "", "exact", format, n, k)


@_product.register_kernel("cuda")
def _product_on_gpu(weight: Tensor, x: Tensor, format: str) -> Tensor:
    weights, _ = _packed_of(weight, format)
    return operator.multiply(x, None, weights)


@_product.register_fake
def _shape_of_product(weight: Tensor, x: Tensor, format: str) -> Tensor:
    n, _, _ = rows._facts(weight, format, x.dtype)
    return x.new_empty((*x.shape[:-1], n))


_Packed = tuple[operator.Weights, dict[str, Any]]
"""Packed weights as products take them, and their arrays by packing."""

_packed: KeptWith[_Packed] = KeptWith()


def _packed_of(weight: Tensor, format: str) -> _Packed:
    """The packed weights of blocks on a GPU, made at the first call and after a change."""

    def made() -> _Packed:
        layer = QuantLinear.from_bytes(weight, format)
        weights = layer._on_gpu()
        assert weights is not None
        return weights, dict(layer.packed)

    return _packed.of(weight, format, made)


# --- what transformers calls ----------------------------------------------------------------------


def mul_mat_vec(weight: Tensor, x: Tensor, ggml_type: int, out_features: int) -> Tensor:
    """y[M, N] = x[M, K] @ dequantize(weight)^T in the dtype of x, any M. weight: uint8 [N, bytes
    of a row]."""
    return _product(weight, x, format_of(ggml_type))


def mul_mat_id(blocks: Tensor, x: Tensor, ids: Tensor, ggml_type: int, out_features: int) -> Tensor:
    """y [T, S, N] of x [T, K] by the experts ids [T, S], see `steps.nn.experts.mul_mat_id`."""
    return experts.mul_mat_id(blocks, x, ids, format_of(ggml_type))


def dequantize(weight: Tensor, ggml_type: int, count: int, cols: int, dtype: Any) -> Tensor:
    """The weights [count, cols] in a dtype, see `steps.nn.rows.dequantize`."""
    return rows.dequantize(weight.reshape(count, -1), format_of(ggml_type), dtype)


def get_rows(weight: Tensor, indices: Tensor, ggml_type: int, cols: int, dtype: Any) -> Tensor:
    """The rows `indices` [M] in a dtype, see `steps.nn.rows.get_rows`."""
    return rows.get_rows(weight, indices, format_of(ggml_type), dtype)


def register() -> None:
    """Let transformers use these kernels for models that it loads from now on. ImportError for a
    transformers that asks for none; 5.24 does."""
    try:
        kernels: Any = import_module("transformers.integrations.gguf.kernels")
        made = kernels.GgufKernel(import_module(__name__))
        _ = kernels._gguf_kernel
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "the installed transformers asks for no kernels of GGUF files, as 5.24 does: "
            f"pip install 'transformers>=5.24' ({error})"
        ) from error
    kernels._gguf_kernel = made
