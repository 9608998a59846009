"""Quantized layers for torch: `QuantLinear`, a drop-in for `torch.nn.Linear` over ggml's blocks.

    from steps.nn.linear import QuantLinear, quantize_model

    layer = QuantLinear.from_float(linear, "q4_0")          # a torch.nn.Linear, or a float matrix
    layer = QuantLinear.from_blocks(blocks, bias)           # of qformats.quantize
    layer = QuantLinear.from_gguf(tensors("model.gguf")["blk.0.ffn_up.weight"])
    print(quantize_model(model, "q4_0", skip=("lm_head",)))     # every Linear of a model, in place

torch is an extra of this project. `layer.shard(mesh, "column")`, or "row", keeps one rank's share
(`steps.nn.shard`), as does FSDP2 of torch 2.13 (`steps.nn.fsdp`); DistributedDataParallel leaves
blocks alone (`keep_out_of_ddp`). Gradients go through frozen layers to adapters
(`steps.nn.adapters`; times in results/worklog/layers.md).

State dicts. `blocks` are uint8 [N, bytes of a row], ggml's own bytes. `_extra_state` says their
format and version in ASCII, uint8: "q4_0, version 1". Blocks of another format, and those without
it, are refused. Models of transformers are saved and loaded as others are (`steps.nn.pretrained`).

Memory. Blocks stay in host memory, wherever the layer is. A GPU holds the packed weights that
kernels read, made on the host when the layer is moved: of the blocks' size, N and K rounded up to
128, twice that with `accuracy="fast"`. While a gradient is computed its weights are there as
floats, too, or of a large layer 256 MB of them at a time.

Products. On a GPU the layer selects the kernel from M at each call, as `steps.gemm` does
(`steps.nn.operator`). The first call with a new M prepares its launches, and compiles kernels that
were not used before, in seconds: run each M once before a CUDA graph is captured. Other processes
compile those of all other layers meanwhile, and after a prompt those of the tokens that follow
(`steps.compile.parallel_compile`; LADDER_PROCESSES=1 in the environment for none). On a CPU weights
are dequantized at every call, which is slow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from qformats import FILE_FORMATS, FORMATS, WEIGHT_FORMATS, Format, quantize
from steps.contract import known_accuracy
from steps.nn import operator as operator
from steps.nn.shard import Shard, group_of
from steps.nn.weight import Weight, refuse
from steps.product.choice import packings
from steps.product.operands import weight_format

if TYPE_CHECKING:
    from torch import Tensor, nn

torch = operator.torch  # without torch that module raises an error of one sentence
if not TYPE_CHECKING:
    nn = torch.nn
is_any_autocast_enabled = operator.is_any_autocast_enabled  # names of the module: found sooner
is_dynamo_compiling = torch.compiler.is_dynamo_compiling

TAKEN: Final = (*WEIGHT_FORMATS, *FILE_FORMATS)
BLOCKS: Final = "blocks"
VERSION: Final = 1
"""Of what a state dict holds."""

KINDS: Final = ("weights", "fast")
"""Names of buffers: the packing that exact kernels read, and that of fast ones."""


class QuantLinear(nn.Linear):
    """y[..., N] = x[..., K] @ dequantize(blocks)^T + bias, in the dtype of x.

    x may be float32, float16 or bfloat16, with any batch dimensions. Sums are float32, the bias is
    added to them, and they are rounded once. On a GPU of compute capability 8.0 or later kernels
    multiply float16 and bfloat16 as they are, and round float32 to float16 or, with a scale per 32
    values, to int8. Where `accuracy` is "fast" they may round x to int8 with a scale per token.

    x has a gradient, computed with the dequantized weights as if x had not been rounded; weights
    have none. On a GPU a kernel unpacks them, rounded to the gradient's dtype, and torch
    multiplies: at 4096 tokens in 1.07 times the time of torch.matmul with weights of 16 bits, at
    512 in 1.4 to 1.6 times (an H200). Equal gradients give equal bits, and a whole step of training
    can be captured in a CUDA graph.

    It is a torch.nn.Linear, for code that looks for Linears, such as PEFT. Its `weight` is no
    Parameter but a read-only tensor, dequantized when it is used (`steps.nn.weight`): writing to it
    raises and loses nothing.

    in_features  : K, a multiple of 32, of K-quants of 256.
    out_features : N, at least 1.
    format       : a name of `qformats.FORMATS` that kernels multiply.
    accuracy     : "exact" or "fast", see `steps.gemm`.
    invariant    : whether, up to 16 tokens, a row of y has the same bits on a GPU whatever the
                   number of tokens and whatever the other rows are, see `steps.gemm`.
    device, dtype : where the layer lies, and the dtype of the bias and of `weight`.

    A new layer holds zeros, for `load_state_dict`; `from_float`, `from_blocks` and `from_gguf` make
    one with weights. Raises ValueError for sizes, formats and devices that cannot be.
    """

    _buffers: dict[str, Any]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: str = "q4_0",
        accuracy: str = "exact",
        invariant: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        nn.Module.__init__(self)
        fmt = _kernel_format(format)
        self.in_features, self.out_features = in_features, out_features
        self.format, self.accuracy = fmt.name, known_accuracy(accuracy)
        self.invariant = bool(invariant)
        self.sharding: Shard | None = None
        self.packings = ""
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        sizes = in_features, out_features
        if not all(isinstance(one, int | np.integer) and one > 0 for one in sizes) or (
            in_features % fmt.elements
        ):
            raise ValueError(
                f"in_features={in_features!r}, out_features={out_features!r}: a layer in "
                f"{fmt.name} needs a multiple of {fmt.elements} in_features, and out_features from "
                "1 up"
            )
        where = torch.device(device) if device is not None else torch.get_default_device()
        row = in_features // fmt.elements * fmt.block_bytes
        zeros = torch.zeros((out_features, row), dtype=torch.uint8, device="cpu")
        self.register_buffer(BLOCKS, zeros)
        made = torch.zeros(out_features, dtype=dtype, device=where) if bias else None
        self.register_parameter("bias", None if made is None else nn.Parameter(made))
        self._move(where)

    @classmethod
    def from_float(
        cls,
        source: Any,
        format: str,
        *,
        bias: Any = None,
        accuracy: str = "exact",
        invariant: bool = False,
    ) -> QuantLinear:
        """Quantize a torch.nn.Linear, or a float matrix [N, K], tensor or array, of any dtype.

        The layer is where the source is. A Linear's bias is shared with it, not copied. Raises
        ValueError for a K that is no multiple of the block, for weights that are not finite, and
        for a format that is only read from files.
        """
        fmt, linear = _written_format(format), source
        if isinstance(source, nn.Linear):
            source, bias = source.weight, source.bias if bias is None else bias
        if isinstance(source, np.ndarray):
            source = torch.from_numpy(np.array(source, np.float32, ndmin=1))
        if not isinstance(source, torch.Tensor):
            raise TypeError(
                f"source is a {type(source).__name__}: give a torch.nn.Linear, or a matrix [N, K] "
                "as a tensor or NumPy array"
            )
        weight = source.detach()
        if weight.ndim != 2 or weight.shape[1] % fmt.elements or not weight.numel():
            what = linear if isinstance(linear, nn.Linear) else f"shape {list(weight.shape)}"
            raise ValueError(
                f"{what} cannot be quantized to {fmt.name}: weights must be [N, K] with K a "
                f"multiple of {fmt.elements}"
            )
        if weight.is_meta:
            raise ValueError(
                f"weights {list(weight.shape)} are on the meta device, without values: load them"
            )
        values = weight.to("cpu", torch.float32).contiguous().numpy()
        options = {"accuracy": accuracy, "invariant": invariant}
        layer = cls._of(fmt, quantize(values, fmt.name), bias, options)
        layer.dtype = weight.dtype if weight.is_floating_point() else layer.dtype
        return layer.to(weight.device)

    @classmethod
    def from_blocks(
        cls,
        blocks: np.ndarray,
        bias: Any = None,
        *,
        accuracy: str = "exact",
        invariant: bool = False,
    ) -> QuantLinear:
        """Make a layer of blocks [N, K/32], of K-quants [N, K/256], on the CPU; blocks are copied.

        bias: [N], a Parameter (taken as it is), tensor or array, or None. Raises TypeError for what
        are no blocks, ValueError for other shapes and for scales that are not finite.
        """
        options = {"accuracy": accuracy, "invariant": invariant}
        fmt = weight_format(blocks)
        return cls._of(fmt, np.array(blocks, order="C"), bias, options)

    @classmethod
    def from_bytes(
        cls,
        blocks: Tensor,
        format: str,
        bias: Any = None,
        *,
        accuracy: str = "exact",
        invariant: bool = False,
    ) -> QuantLinear:
        """Make a layer of ggml's own bytes, uint8 [N, bytes of a row], where they are.

        On the CPU they are the layer's blocks, not copied. Those on a GPU are copied to the host
        and packed from there; the layer does not keep them, so whoever drops them has one layer
        twice for as long as this takes. bias: see `from_blocks`. Raises ValueError for bytes that
        are no blocks of this format, and for scales that are not finite.
        """
        fmt = _kernel_format(format)
        if blocks.dtype != torch.uint8 or blocks.ndim != 2 or blocks.shape[1] % fmt.block_bytes:
            raise ValueError(
                f"blocks are {blocks.dtype} {list(blocks.shape)}: {fmt.name} needs uint8 [N, bytes "
                f"of a row], a multiple of {fmt.block_bytes}"
            )
        host = operator.host_blocks(blocks.detach().cpu().contiguous(), fmt)
        weight_format(host)
        options = {"accuracy": accuracy, "invariant": invariant}
        return cls._of(fmt, host, bias, options).to(blocks.device)

    @classmethod
    def _of(
        cls, fmt: Format, blocks: np.ndarray, bias: Any, options: dict[str, Any]
    ) -> QuantLinear:
        """As `from_blocks`, of blocks with finite scales that nobody else has."""
        n, blocks_k = blocks.shape
        k = blocks_k * fmt.elements
        layer = cls(k, n, False, format=fmt.name, device="meta", **options)
        layer.blocks = torch.from_numpy(blocks.view(np.uint8))
        if bias is not None:
            if not isinstance(bias, nn.Parameter):
                own = torch.from_numpy(np.array(bias)) if isinstance(bias, np.ndarray) else bias
                bias = nn.Parameter(own.detach().clone(), requires_grad=False)
            if tuple(bias.shape) != (n,):
                raise ValueError(f"bias must have shape [{n}], got {list(bias.shape)}")
            layer.bias, layer.dtype = bias, bias.dtype
        return layer

    @classmethod
    def from_gguf(
        cls, tensor: Any, bias: Any = None, *, accuracy: str = "exact", invariant: bool = False
    ) -> QuantLinear:
        """Make a layer of a `qformats.gguf_file.Tensor` [N, K], on the CPU; bias may be another.

        Blocks are copied as they are, in the file's order of rows. Raises ValueError for a type
        that no kernel takes.
        """
        if tensor.type not in TAKEN:
            _ = tensor.array  # raises what to do with a type that is not read either
            raise ValueError(
                f"{tensor.name} is {tensor.type} and the kernels take {', '.join(TAKEN)}: "
                'QuantLinear.from_float(tensor.values(), "q8_0") quantizes it again'
            )
        bias = bias.values() if hasattr(bias, "values") and hasattr(bias, "type") else bias
        return cls.from_blocks(tensor.array, bias, accuracy=accuracy, invariant=invariant)

    def shard(
        self,
        mesh: Any,
        kind: str,
        *,
        parts: Sequence[int] | None = None,
        unit: int | None = None,
        gather: bool = False,
    ) -> QuantLinear:
        """Keep this rank's share of the weights, in place, for tensor parallelism; returns itself.

        All ranks call this with the same layer. Do it before the layer is moved to a GPU, which
        then never holds all of it.

        mesh   : a DeviceMesh of one dimension, a process group, or None for all ranks.
        kind   : "column": the rank has some of the N features. x is whole and y is the rank's
                 share, or whole with `gather`. "row": it has some of the K. x is the rank's share,
                 as a "column" layer writes it, and y is the sum of all ranks', whole.
        parts  : of "column": the sizes of matrices below each other in this one, such as (4096,
                 1024, 1024) of queries, keys and values. Each is split by itself.
        unit   : how many features stay together, such as those of a head. By default 1; of "row",
                 where it is a multiple of the format's block, that block.

        A bias is added once, to the sum of all ranks. Where y takes up to `all_reduce.ONE_SHOT`
        bytes in float32, ranks add up float32 and round once; larger ones are rounded to the dtype
        of x by each rank and then added up.
        `in_features`, `out_features`, `weight` and `dequantize` are the rank's. A state dict is
        whole: `state_dict` gathers it, so all ranks must call it, and `load_state_dict` takes the
        whole one. ValueError where ranks cannot share the layer, with the numbers.
        """
        if self.sharding is not None:
            raise ValueError(f"the layer is split already: {self.sharding}")
        block = FORMATS[self.format].elements
        n, k, least = self.out_features, self.in_features, block if kind == "row" else 1
        unit = least if unit is None else unit
        if unit % least:
            raise ValueError(f"unit={unit} cuts blocks of {self.format}: use a multiple of {block}")
        shard = Shard(group_of(mesh), kind, n, k, tuple(parts or (n,)), unit, gather)
        here, bias = self.device, self._parameters["bias"]
        self._buffers[BLOCKS] = shard.share(self.blocks)
        if bias is not None:
            own = nn.Parameter(shard.share(bias.detach()), requires_grad=bias.requires_grad)
            self._parameters["bias"] = own
        if kind == "column":
            self.out_features = shard.count(shard.rank)
        else:
            self.in_features = shard.count(shard.rank)
        self.sharding = shard
        if self.packings:
            self._move(here)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """y [..., N] of x [..., K]. Raises TypeError for no tensor and for another dtype than
        float32, float16 and bfloat16, ValueError for another K or device."""
        if not isinstance(x, torch.Tensor):
            kind = type(x)
            raise TypeError(
                f"x is a {kind.__module__}.{kind.__qualname__}, and a layer takes a torch.Tensor: "
                "use torch.as_tensor(x)"
            )
        shard, parameters = self.sharding, self._parameters
        # not by torch's lookup, which takes longer, unless a property computes it
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401
        if shard is None:
            return self._product(x, bias)
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"x must have shape [..., {self.in_features}] for this rank ({shard} of the "
                f"{shard.n} x {shard.k} layer), got {list(x.shape)}"
            )
        if shard.kind == "column":
            y = self._product(shard.input(x), bias)
            return shard.gathered(y) if shard.gather else y
        few = shard.sums(self.device).is_small(x.numel() // self.in_features * self.out_features)
        y = shard.summed(self._product(x, None, wide=few))
        return (y if bias is None else y + bias).to(x.dtype)

    def _product(self, x: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
        """The product of this rank's blocks plus a bias, in float32 where it is wide."""
        if is_any_autocast_enabled():
            x = _autocast(x)
        graded = _has_gradient(x, bias)
        if not is_dynamo_compiling() and (held := self._at_once(x, bias)) is not None:
            dtype = torch.float32 if wide else None
            if graded:
                y: Tensor = operator.Multiplied.apply(x, bias, held, self.unpacked_from, dtype)
                return y
            return operator.multiply(x, bias, held, dtype)
        weights = self._arrays("weights")
        here = (weights[0] if weights else self.blocks).device
        if x.device != here:
            raise ValueError(f"x is on {x.device} and the layer is on {here}: move one of them")
        if x.is_cuda and not weights:
            raise ValueError(
                f"the blocks are on {here} and not packed, as something other than the layer's "
                'to() moved them: call layer.to("cuda") before, for FSDP before shard_blocks'
            )
        call: Callable[..., Tensor] = operator.product
        if operator.is_transformed():
            call = operator.Linear.apply
        elif graded or torch.jit.is_tracing():  # a trace is checked with and without gradients
            call = operator.linear
        return call(
            x,
            bias,
            None if x.is_cuda else self.blocks,
            weights,
            self._arrays("fast"),
            self.packings,
            self.accuracy,
            self.format,
            self.out_features,
            self.in_features,
            self.invariant,
            wide,
        )

    def _directly(self, x: Tensor, bias: Tensor | None) -> operator.Weights | None:
        """`_at_once`, where the product has no gradient; else None."""
        return None if _has_gradient(x, bias) else self._at_once(x, bias)

    def _at_once(self, x: Tensor, bias: Tensor | None) -> operator.Weights | None:
        """The packed weights where the product needs no operator of torch: on the GPU, where torch
        intercepts nothing (`operator.runs_at_once`); else None."""
        held = self._on_gpu()
        if held is None or x.get_device() != held.device or not operator.runs_at_once(x):
            return None
        if bias is not None and bias.get_device() != held.device:
            return None
        return held

    def dequantize(self) -> Tensor:
        """The weights, float32 [N, K], on the layer's device: a new tensor at each call. On a GPU
        they are those that kernels multiply (`steps.kernels.unpack`): of K-quants and iq4_xs with
        scales rounded to 11 bits, else the same."""
        return operator.dequantize(*self.unpacked_from, torch.float32)

    @property
    def unpacked_from(self) -> tuple[Any, ...]:
        """What `operator.dequantize` and `operator.linear_input_gradient` make the weights of, on
        the layer's device: their arguments from blocks to k."""
        weights = self._arrays("weights")
        blocks = None if weights and weights[0].is_cuda else self.blocks
        size = self.out_features, self.in_features
        return blocks, weights, self.packings, self.format, *size

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weights [N, K] in the layer's dtype, read-only, dequantized when they are used."""
        if torch.compiler.is_compiling():  # where nothing uses it, the compiler leaves it out
            return operator.dequantize(*self.unpacked_from, self.dtype)
        shape = self.out_features, self.in_features
        weight = Weight(
            torch.empty(shape, dtype=self.dtype, device="meta"),
            self.device,
            lambda: operator.dequantize(*self.unpacked_from, self.dtype),
            lambda x, bias: self._product(x, bias),
        )
        if "_is_hf_initialized" in self.__dict__:  # while transformers loads it, see `pretrained`
            weight._is_hf_initialized = True
        return weight

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            refuse("an assignment")
        super().__setattr__(name, value)

    @property
    def device(self) -> Any:
        """The device that x must be on."""
        arrays = self._arrays("weights")
        return (arrays[0] if arrays else self.blocks).device

    @property
    def key(self) -> tuple[Any, int]:
        """What is asked of the packed weights, and the number of the GPU that holds them."""
        size = self.format, self.out_features, self.in_features
        layouts = tuple(self.packings.split())
        asked = operator.request_of(*size, self.accuracy, layouts, self.invariant)
        index = self.device.index
        return asked, -1 if index is None else index

    @property
    def device_bytes(self) -> int:
        """Bytes of the weights on the layer's device."""
        arrays = [*self._arrays("weights"), *self._arrays("fast")] or [self.blocks]
        return sum(one.nbytes for one in arrays)

    @property
    def packed(self) -> dict[str, Sequence[Tensor]]:
        """The arrays of each packing on the GPU, by its name; none on a CPU."""
        return operator.by_packing(self.packings, self._arrays("weights"), self._arrays("fast"))

    def explain(self, m: int, dtype: Any = torch.float32) -> str:
        """Which kernel multiplies x [m, K] of a dtype on this GPU, and why, in a sentence."""
        if self.device.type != "cuda":
            return f"the layer is on {self.device}: torch multiplies dequantized weights"
        held, name = self._on_gpu(), operator.NAMES[dtype]
        assert held is not None
        with torch.cuda.device(self.device):
            return str(operator.prepared(held, m, name, name)[0])

    def extra_repr(self) -> str:
        options = "" if self.accuracy == "exact" else f", accuracy={self.accuracy}"
        options += ", invariant=True" if self.invariant else ""
        options += f", {self.sharding}" if self.sharding else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, format={self.format}{options}"
        )

    # --- memory ---

    _held: operator.Weights | None = None

    def _on_gpu(self) -> operator.Weights | None:
        """The packed weights as `operator.multiply` takes them; None on a CPU."""
        held = self._held
        if held is None or held.first is not self._buffers.get("weights_0"):
            if not self.packings:
                return None
            size = self.format, self.out_features, self.in_features
            packed, invariant = self.packed, self.invariant
            held = self._held = operator.Weights(*size, self.accuracy, packed, invariant)
        return held

    def __getstate__(self) -> dict[str, Any]:
        """Without the addresses of its arrays, which a copy has elsewhere."""
        return {name: value for name, value in self.__dict__.items() if name != "_held"}

    def _arrays(self, kind: str) -> list[Tensor]:
        """The buffers of one of `KINDS`, in order."""
        return [array for name, array in self._buffers.items() if name.startswith(kind)]

    def _move(self, device: Any) -> None:
        """Make the packings that a device needs from the blocks, and drop the others."""
        for name in [name for name in self._buffers if name != BLOCKS]:
            del self._buffers[name]
        self.packings = ""
        if device.type != "cuda":
            if device.type not in ("cpu", "meta"):
                raise ValueError(f"a QuantLinear multiplies on cuda and on cpu, not on {device}")
            self.blocks = self._on_host(device)
            return
        self.blocks = self._on_host(torch.device("cpu"))
        steps = packings(self.format, operator.capability(device), self.accuracy, self.in_features)
        for name, array in self._packed_by(steps, self.blocks):
            uploaded = operator.upload(array, device)
            self.register_buffer(name, uploaded, persistent=False)
        self.packings = " ".join(step.pack.__name__ for step in steps)
        operator.reserve_counters(uploaded.device)
        operator.first_products_follow(self)

    def _packed_by(self, steps: Sequence[Any], blocks: Tensor) -> Iterator[tuple[str, np.ndarray]]:
        """Names of buffers, and what kernels read of blocks on the host."""
        host = operator.host_blocks(blocks, FORMATS[self.format])
        for kind, step in zip(KINDS, steps, strict=False):
            for i, array in enumerate(step.pack(host)):
                yield f"{kind}_{i}", array

    def _on_host(self, device: Any) -> Tensor:
        if self.blocks.is_meta and device.type != "meta":  # there are no values to copy
            return torch.zeros_like(self.blocks, device=device)
        return self.blocks.to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        """.to(), .half(), .cuda() and their like: they move and cast the bias. Blocks keep their
        dtype, and packings are made where the layer moves to a GPU."""
        here, there = apply_past_buffers(self, fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=here)).dtype
        if there != here:
            self._move(there)
        elif there.type == "cpu":
            same = fn(self.blocks)  # such as share_memory()
            self.blocks = same if same.dtype == torch.uint8 else self.blocks
        return self

    def get_extra_state(self) -> Tensor:
        """The format and version of the blocks, as a state dict holds them: "q4_0, version 1" in
        ASCII, uint8."""
        return torch.tensor(list(said(self.format).encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """Raises ValueError for blocks of another format or version."""
        if (why := refused(state, self.format)) is not None:
            raise ValueError(why)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.sharding is not None:
            for name in (BLOCKS, "bias"):
                if prefix + name in destination:
                    destination[prefix + name] = self.sharding.whole(destination[prefix + name])

    def _refused(self, state_dict: Any, prefix: str) -> str | None:
        """Why blocks of a state dict are not loaded: they were cast, or do not say that they are
        of this format."""
        if prefix + BLOCKS not in state_dict:
            return None
        if why := cast(state_dict, prefix, (BLOCKS,)):
            return why
        if (key := f"{prefix}_extra_state") not in state_dict:
            return (
                f"{prefix}{BLOCKS} are of a file that does not say their format, as older ones "
                f"did not: where they are {self.format}, set state_dict[{key!r}] = "
                "layer.get_extra_state()"
            )
        why = refused(state_dict[key], self.format)
        return why and f"{prefix}{BLOCKS}: {why}"

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
        """Blocks of another format, or whose scales are not finite, are an error of
        `load_state_dict`, and not loaded."""
        if (why := self._refused(state_dict, prefix)) is not None:
            error_msgs.append(why)
            return
        here = self.device
        if (shard := self.sharding) is not None:
            row = self.blocks.shape[1] * shard.k // self.in_features
            state_dict = {key: one for key, one in state_dict.items() if key.startswith(prefix)}
            for name, shape in ((BLOCKS, (shard.n, row)), ("bias", (shard.n,))):
                if (one := state_dict.get(prefix + name)) is None:
                    continue
                if tuple(one.shape) != shape:
                    error_msgs.append(
                        f"{prefix}{name} has shape {list(one.shape)}, and the whole layer has "
                        f"{list(shape)}: state dicts are whole where ranks share a layer"
                    )
                    return
                state_dict[prefix + name] = shard.share(one)
        given = state_dict.get(prefix + BLOCKS)
        if given is not None and given.shape == self.blocks.shape and not given.is_meta:
            try:
                local = given.to_local() if hasattr(given, "to_local") else given
                blocks = local.cpu().contiguous()
                weight_format(operator.host_blocks(blocks, FORMATS[self.format]))
            except ValueError as error:
                error_msgs.append(f"{prefix}{BLOCKS}: {error}")
                return
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        if self.packings:
            self._move(here)


def _has_gradient(x: Tensor, bias: Tensor | None) -> bool:
    """Whether torch is to differentiate the product."""
    return torch.is_grad_enabled() and (
        x.requires_grad or (bias is not None and bias.requires_grad)
    )


def _autocast(x: Tensor) -> Tensor:
    """x as torch's Linear would read it."""
    device = x.device.type
    if x.dtype not in operator.NAMES or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def said(format_name: str) -> str:
    """What a state dict says about blocks."""
    return f"{format_name}, version {VERSION}"


def refused(state: Any, format_name: str) -> str | None:
    """Why a layer cannot load blocks with this extra state; None where it can."""
    if torch.is_tensor(state) and state.is_meta:  # says nothing, as the blocks have no values
        return None
    told = repr(state)
    if torch.is_tensor(state) and state.dtype == torch.uint8:
        told = bytes(state.flatten().tolist()).decode("ascii", "backslashreplace")
    if told == (wanted := said(format_name)):
        return None
    return f"the state holds {told}, and the layer takes {wanted}: make one of that format"


def apply_past_buffers(
    layer: Any, fn: Callable[[Tensor], Tensor], recurse: bool
) -> tuple[Any, Any]:
    """`_apply` of a module without its buffers, which are packed weights: (the device that it is
    on, the device that fn moves to)."""
    buffers, layer._buffers = layer._buffers, {}
    try:
        nn.Module._apply(layer, fn, recurse)
    finally:
        layer._buffers = buffers
    here = layer.device
    return here, fn(torch.empty(0, dtype=torch.uint8, device=here)).device


def cast(state_dict: Mapping[str, Any], prefix: str, names: Iterable[str]) -> str | None:
    """Why blocks of a state dict cannot be loaded that something has cast to another dtype, where
    NaN and fractions would become bytes; None where they are bytes, or not there."""
    for name in names:
        one = state_dict.get(prefix + name)
        if isinstance(one, torch.Tensor) and one.dtype != torch.uint8:
            found = str(one.dtype).removeprefix("torch.")
            return f"{prefix}{name} are {found}, and blocks are bytes: load them as uint8, not cast"
    return None


def _kernel_format(name: str) -> Any:
    if name not in TAKEN:
        raise ValueError(f"format is {name!r}: it must be one of {', '.join(TAKEN)}")
    return FORMATS[name]


def _written_format(name: str) -> Any:
    """A format that floats can be quantized to; ValueError for others."""
    fmt = _kernel_format(name)
    if not fmt.written:
        written = ", ".join(one for one in TAKEN if FORMATS[one].written)
        raise ValueError(f"{name} is only read from files: quantize to one of {written}")
    return fmt


# --- whole models ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replaced:
    """A layer that was quantized; bytes of its weights on its device, before and after."""

    name: str
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Report:
    """What `quantize_model` did; `print` it.

    skipped: (name, why). unused: entries of skip that match no layer.
    """

    format: str
    replaced: tuple[Replaced, ...]
    skipped: tuple[tuple[str, str], ...]
    unused: tuple[str, ...] = ()

    @property
    def saved(self) -> int:
        """By how many bytes the weights on the model's device shrank."""
        return sum(one.before - one.after for one in self.replaced)

    def __str__(self) -> str:
        before = sum(one.before for one in self.replaced)
        lines = [
            f"{len(self.replaced)} layers are {self.format} now: {before:,} -> "
            f"{before - self.saved:,} bytes of weights, {self.saved:,} saved"
        ]
        lines += [f"  {one.name}: {one.before:,} -> {one.after:,}" for one in self.replaced]
        lines += [f"  {name} is unchanged: {why}" for name, why in self.skipped]
        lines += [f"  skip={entry!r} matches no layer" for entry in self.unused]
        return "\n".join(lines)


@dataclass(slots=True)
class _Candidate:
    """A Linear under all its names, and why it is not to be replaced, if it is not."""

    linear: Any
    names: list[str] = field(default_factory=list)
    why: str | None = None


def quantize_model(
    model: Any,
    format: str = "q4_0",
    skip: Iterable[str] = ("lm_head",),
    *,
    accuracy: str = "exact",
    invariant: bool = False,
) -> Report:
    """Replace every torch.nn.Linear in a model, in place, by a QuantLinear on the same device, and
    the experts of transformers' models by a `QuantExperts`.

    format : a name of `qformats.FORMATS` that floats can be quantized to.
    skip   : layers to leave alone. An entry is the name of a layer or of a module that contains it,
             in full or some successive parts of it: "lm_head" matches "lm_head" and
             "model.lm_head", "mlp" all layers in modules of that name, "layers.0" those of the
             first layer. With *, ? or [ it is a pattern for the whole name: "*.down_proj".
    accuracy, invariant : of all layers, see `QuantLinear`; accuracy of experts, too.

    These are left alone too, and reported with the reason: layers whose K is not a multiple of 32;
    subclasses of Linear and those with hooks, which may do more; adapters, which are beside a
    `base_layer` or are trained beside frozen layers; layers whose weights are tied to a module that
    stays, such as the embedding; and matrices of other modules, such as GPT-2's Conv1D. Linears
    with the same weights and the same bias become one layer.

    A model on the meta device becomes a skeleton: `load_state_dict(state, assign=True)` fills it.

    Returns a `Report`; `print` it. Layers are quantized one after another. Raises ValueError for an
    unknown format or accuracy, and, with its name, for a layer that cannot be quantized, such as
    one that holds NaN; the layers before that one have been replaced by then.
    """
    fmt, accuracy = _written_format(format), known_accuracy(accuracy)
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    if others := [one for one in skip if not isinstance(one, str)]:
        raise TypeError(f"skip has {others[0]!r}: it must be names of layers, such as ('lm_head',)")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: it must be a torch.nn.Module")
    if isinstance(model, nn.Linear):
        raise ValueError("the model is itself a Linear: use QuantLinear.from_float(model, format)")
    modules = dict(model.named_modules(remove_duplicate=False))
    candidates: dict[int, _Candidate] = {}
    for name, module in modules.items():
        if isinstance(module, nn.Linear) and not isinstance(module, QuantLinear):
            candidates.setdefault(id(module), _Candidate(module)).names.append(name)
    used: set[str] = set()
    adapters = _adapters(modules)
    for one in candidates.values():
        matched = [entry for entry in skip if any(_matches(entry, name) for name in one.names)]
        used.update(matched)
        one.why = adapters.get(id(one.linear)) or _why_not(one.linear, fmt.name)
        one.why = f"skip={matched[0]!r}" if matched else one.why
    _keep_ties(modules, candidates)

    replaced: list[Replaced] = []
    layers: dict[Any, QuantLinear] = {}
    counted: set[Any] = set()
    for one in candidates.values():
        if one.why is not None:
            continue
        weight = one.linear.weight
        memory, before, known = _memory(weight), weight.nbytes, len(layers)
        key = memory, weight.shape, weight.stride(), weight.dtype, id(one.linear.bias)
        layer = layers.get(key)
        if layer is None:
            try:
                make = empty_layer if weight.is_meta else QuantLinear.from_float
                layer = make(one.linear, fmt.name, accuracy=accuracy, invariant=invariant)
            except ValueError as error:
                raise ValueError(f"{one.names[0]}: {error}") from error
            layers[key] = layer.train(one.linear.training)
        for name in one.names:
            parent, _, last = name.rpartition(".")
            setattr(modules[parent], last, layer)
            modules[name] = layer
        after = layer.device_bytes if len(layers) > known else 0
        replaced.append(Replaced(one.names[0], 0 if memory in counted else before, after))
        counted.add(memory)
        one.linear = weight = None  # its memory is free for the next one
    skipped = [(one.names[0], one.why) for one in candidates.values() if one.why is not None]
    of_experts = _replace_experts(modules, fmt.name, accuracy, skip, used)
    replaced += of_experts[0]
    skipped += of_experts[1]
    skipped += _not_linear(modules)
    unused = tuple(entry for entry in skip if entry not in used)
    keep_out_of_ddp(model)
    if "transformers" in sys.modules:  # imports this module, and transformers
        import_module("steps.nn.pretrained").tell_transformers(model)
    return Report(fmt.name, tuple(replaced), tuple(skipped), unused)


def _replace_experts(
    modules: dict[str, Any], format: str, accuracy: str, skip: Sequence[str], used: set[str]
) -> tuple[list[Replaced], list[tuple[str, str]]]:
    """Replace experts of transformers' models: (those replaced, those skipped and why)."""
    of = import_module("steps.nn.experts")  # imports this module
    replaced, skipped = [], []
    for name, module in list(modules.items()):
        if isinstance(module, of.QuantExperts) or not hasattr(module, "gate_up_proj"):
            continue
        if isinstance(module.gate_up_proj, nn.Module) or not name:
            continue  # a Linear of gates and ups
        matched = [entry for entry in skip if _matches(entry, name)]
        used.update(matched)
        why = f"skip={matched[0]!r}" if matched else of.why_not(module, format)
        if why is not None:
            skipped.append((name, why))
            continue
        before = sum(one.nbytes for one in module.parameters())
        try:
            made = of.QuantExperts.from_float(module, format, accuracy=accuracy)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        parent, _, last = name.rpartition(".")
        setattr(modules[parent], last, made)
        modules[name] = made
        replaced.append(Replaced(name, before, made.device_bytes))
    return replaced, skipped


class _Buffers:
    """The names of all buffers of `QuantLinear`s and `QuantExperts` in a model, when they are asked
    for, and others. There are more of them once the model is on a GPU."""

    def __init__(self, model: Any, others: Iterable[str]) -> None:
        self.model, self.others = model, others

    def __iter__(self) -> Iterator[str]:
        yield from self.others
        for name, one in self.model.named_modules(remove_duplicate=False):
            if isinstance(one, QuantLinear) or f"down_{BLOCKS}" in one._buffers:
                yield from (f"{name}.{buffer}".lstrip(".") for buffer in one._buffers)


def keep_out_of_ddp(model: Any) -> None:
    """Let `DistributedDataParallel(model)` leave the blocks of `QuantLinear`s alone.

    It would send them to all ranks before each forward, and cannot over NCCL, as blocks lie on the
    CPU. Every rank must have the same ones, such as those of one file; nothing compares them.
    `quantize_model` calls this for its model. Call it for what you wrap instead, such as a
    PeftModel, or a module that holds the model.
    """
    others = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    if not isinstance(others, _Buffers):
        model._ddp_params_and_buffers_to_ignore = _Buffers(model, others)


def empty_layer(
    linear: Any, format: str, *, dtype: str | None = None, **options: Any
) -> QuantLinear:
    """A layer without values in the place of a Linear on the meta device. dtype: by its name, that
    of the layer where it is not the Linear's."""
    k, n, own = linear.in_features, linear.out_features, linear.weight.dtype
    own = own if dtype is None else operator.DTYPES[dtype]
    layer = QuantLinear(k, n, False, format=format, device="meta", dtype=own, **options)
    layer.bias = linear.bias
    return layer


def _matches(entry: str, name: str) -> bool:
    if any(sign in entry for sign in "*?["):
        return fnmatchcase(name, entry)
    return f".{entry}." in f".{name}."


def _why_not(linear: Any, format_name: str) -> str | None:
    """Why a layer is not replaced, whatever its name."""
    if type(linear) is not nn.Linear:
        return f"a {type(linear).__name__} may do more than a Linear"
    size = FORMATS[format_name].elements
    if linear.in_features % size or not linear.weight.numel():
        return f"K={linear.in_features} is not a multiple of {size}, the block of {format_name}"
    hooked = any(kept and "_hooks" in name for name, kept in vars(linear).items())
    hooks = linear.weight._backward_hooks, linear.weight._post_accumulate_grad_hooks
    if hooked or any(hooks) or "forward" in vars(linear):
        return "it has hooks, which the new layer would not have"
    return None


def _adapters(modules: dict[str, Any]) -> dict[int, str]:
    """Of each Linear that is part of an adapter: why it is not replaced, by its id. An adapter is
    beside a `base_layer`, as PEFT's are, or is trained in a model that has frozen Linears."""
    linears = {name: one for name, one in modules.items() if isinstance(one, nn.Linear)}
    frozen = any(
        isinstance(one, QuantLinear) or not one.weight.requires_grad for one in linears.values()
    )
    found = {}
    for name, one in linears.items():
        parts = name.split(".")
        for i in range(len(parts)):
            owner = modules[".".join(parts[:i])]
            if hasattr(owner, "base_layer") and parts[i] != "base_layer":
                found[id(one)] = f"it is part of an adapter of {'.'.join(parts[:i]) or 'the model'}"
        if frozen and one.weight.requires_grad:
            found.setdefault(id(one), "it is being trained, and other Linears are frozen")
    return found


def _not_linear(modules: dict[str, Any]) -> list[tuple[str, str]]:
    """Matrices that are multiplied and are no Linear's, and why they are not replaced."""
    found = []
    for name, module in modules.items():
        for last, one in module.named_parameters(recurse=False):
            matrix = one.ndim in (2, 3) and one.is_floating_point() and min(one.shape) > 1
            if matrix and not isinstance(module, (nn.Linear, nn.Embedding, nn.EmbeddingBag)):
                what = f"a {type(module).__name__} multiplies it itself; only Linears are replaced"
                found.append((f"{name}.{last}".lstrip("."), f"{what}"))
    return found


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """A key that tensors share that begin in one place. They need not be the same numbers: one may
    be a part or the transpose of the other."""
    return tensor.device, id(tensor) if tensor.is_meta else tensor.data_ptr()


def _keep_ties(modules: dict[str, Any], candidates: dict[int, _Candidate]) -> None:
    """Leave layers alone whose weights are tied to a module that stays."""
    owners: dict[tuple[Any, ...], list[tuple[str, Any]]] = {}
    for name, module in modules.items():
        for last, parameter in module.named_parameters(recurse=False):
            owners.setdefault(_memory(parameter), []).append((f"{name}.{last}", module))
    for one in candidates.values():
        if one.why is None:
            stays: Sequence[str] = [
                name
                for name, module in owners[_memory(one.linear.weight)]
                if id(module) not in candidates or candidates[id(module)].why is not None
            ]
            if stays:
                one.why = f"its weights are tied to {stays[0].lstrip('.')}, which stays"
