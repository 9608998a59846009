"""A transformers model that was loaded from a GGUF file, with the file's own blocks.

    from transformers import AutoModelForCausalLM
    from steps.nn.gguf import use_gguf

    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf")
    print(use_gguf(model, "folder/model.gguf").summary())
    model.to("cuda")

transformers has two loaders of GGUF files. The older one makes float weights of all of the file.
The newer one, for a few architectures, leaves blocks packed where kernels are registered
(`steps.nn.ggml_kernels`), else makes floats too. After either, `use_gguf` gives every linear layer,
embedding and set of experts the blocks that the file has for it. Nothing is quantized again.

Which tensor belongs to which module is transformers' own mapping of names, orders of rows and of
columns. It is not trusted: the blocks' values must be those that the module has.

Memory. On the host blocks are pages of the file, mapped; those in another order of rows are a copy.
A matrix that is the embedding and the output layer, too, is on a GPU in both ways. A module's
floats are freed when the next one is looked at.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from qformats import FORMATS
from qformats.gguf_file import READABLE, metadata, tensors
from qformats.gguf_file import Tensor as FileTensor
from qformats.terminal import shown
from steps.nn import operator as operator
from steps.nn.experts import QuantExperts
from steps.nn.linear import TAKEN, QuantLinear
from steps.nn.rows import QuantEmbedding, dequantize

torch = operator.torch
if TYPE_CHECKING:
    from torch import Tensor, nn
else:
    Tensor, nn = torch.Tensor, torch.nn

VALUES: Final = 1 << 24
"""Values that are compared at once: 64 MB of float32."""
ROUNDINGS: Final = 8
"""By how many last places of the row's largest weight a module's weight may differ from the file's:
the newer loader dequantizes in the model's dtype, step by step."""
EXPERTS: Final = ("gate_up_proj", "down_proj")
"""Parameters of a module of experts."""
PACKED: Final = ("GgufLinear", "GgufEmbedding", "GgufExperts")
"""Modules of the newer loader; versions before 5.24 have some of them, or none."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A module that has the file's blocks now; bytes of its weights on its device, before and
    after."""

    name: str
    tensors: tuple[str, ...]
    formats: tuple[str, ...]
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """What `use_gguf` did; `print` it, or its `summary`.

    taken  : modules that have the file's blocks now.
    kept   : (name, why) of linear layers, embeddings and experts that are as they were.
    unused : tensors of the file with blocks that no module took.
    """

    path: str
    taken: tuple[Taken, ...]
    kept: tuple[tuple[str, str], ...]
    unused: tuple[str, ...]

    def summary(self) -> str:
        """All of it but the list of modules that took blocks."""
        before, after = (sum(getattr(one, at) for one in self.taken) for at in ("before", "after"))
        lines = [
            f"{len(self.taken)} modules have the blocks of {self.path} now: {before:,} -> "
            f"{after:,} bytes of weights"
        ]
        lines += [f"  {name} is unchanged: {why}" for name, why in self.kept]
        lines += [f"  {name} of the file is not used" for name in self.unused]
        return "\n".join(lines)

    def __str__(self) -> str:
        first, *rest = self.summary().split("\n")
        taken = [
            f"  {one.name}: {', '.join(one.formats)} of {', '.join(one.tensors)}"
            for one in self.taken
        ]
        return "\n".join([first, *taken, *rest])


def use_gguf(
    model: Any,
    path: str | os.PathLike[str],
    *,
    accuracy: str = "exact",
    invariant: bool = False,
) -> Blocks:
    """Let a model take its weights from the blocks of the GGUF file that it was loaded from, in
    place.

    model : of transformers, by its `from_pretrained(..., gguf_file=...)`, on the CPU or on a GPU.
    path  : the file; of a split one the first part. It must not change while the model is in use.
    accuracy, invariant : of all linear layers, see `steps.nn.linear.QuantLinear`; accuracy of
                          experts, too.

    Linear layers become `QuantLinear`, embeddings `QuantEmbedding` and experts `QuantExperts`, on
    the devices where they are. Modules stay, and are named with the reason, that the file has no
    blocks for, whose values differ from the file's, that have hooks, or that do more than the ones
    above. Returns a `Blocks`: `print` it.

    Raises OSError and GGUFError for a file that cannot be read, ValueError for a model or a file
    whose names transformers does not map, ImportError without transformers.
    """
    found = tensors(path)
    held = {name: one for name, one in found.items() if _is_quantized(one)}
    sources = _sources(model, metadata(path), held, Path(path))
    options = {"accuracy": accuracy, "invariant": invariant}
    return _Replacing(model, str(path), found, sources, options).run()


def _is_quantized(tensor: FileTensor) -> bool:
    """Of blocks, those that no codec here reads, too."""
    return tensor.type in FORMATS or tensor.type not in READABLE


# --- which tensors of the file a parameter is made of ---------------------------------------------


class _Source(NamedTuple):
    """A tensor of the file, the order in which a parameter has its rows, None for the file's, and
    that of the values which its columns multiply, None for that of the module's input."""

    tensor: FileTensor
    order: Tensor | None = None
    inputs: Tensor | None = None

    def blocks(self) -> Tensor:
        """uint8 [..., N, bytes of a row], in the parameter's order of rows, on the CPU."""
        one, shape = self.tensor, self.tensor.shape
        # "c": pages of the file; what is written to them stays in this process
        mapped = np.memmap(one.path, np.uint8, "c", one.offset, (one.nbytes,))
        bytes_ = torch.from_numpy(np.asarray(mapped)).view(
            *shape[:-1], one.nbytes // prod(shape[:-1])
        )
        return bytes_ if self.order is None else bytes_[self.order]


Sources = dict[str, list[_Source]]
"""By the name of a parameter: one tensor, or those that lie below each other in it."""


def _sources(model: Any, keys: dict[str, Any], held: dict[str, FileTensor], path: Path) -> Sources:
    architecture = str(keys.get("general.architecture"))
    try:
        older: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    except ImportError as error:
        raise ImportError(
            f"use_gguf needs transformers: pip install transformers ({error})"
        ) from error
    try:
        newer: Any = import_module("transformers.integrations.gguf.utils")
    except ImportError:  # before 5.24
        newer = None
    if not hasattr(model, "config"):
        raise ValueError(
            f"a {type(model).__name__} has no config: use_gguf takes a model of transformers that "
            f"was loaded from {path}"
        )
    if newer is not None and newer.is_gguf_arch_supported(architecture):
        return _by_conversions(model, architecture, held)
    try:
        return _by_names(model, architecture, held, older)
    except NotImplementedError as error:
        raise ValueError(
            f"{path} is of architecture {shown(architecture)}, whose names transformers does "
            "not map to a model"
        ) from error


def _by_conversions(model: Any, architecture: str, held: dict[str, FileTensor]) -> Sources:
    """As the newer loader maps them: renamings, then conversions of values."""
    loading: Any = import_module("transformers.core_model_loading")
    mapping = import_module("transformers.integrations.gguf.utils").get_gguf_conversion_mapping(
        architecture, model.config
    )
    renamings = [one for one in mapping if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, loading.WeightConverter)]
    of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    known = model.state_dict()
    found: dict[str, list[tuple[int, _Source]]] = {}
    for name, tensor in held.items():
        parameter, pattern = loading.rename_source_key(
            name, renamings, converters, model.base_model_prefix, known
        )
        order = inputs = None
        converter = of_pattern.get(pattern)
        for operation in getattr(converter, "operations", ()):
            if not getattr(operation, "supports_packed", False):
                break
            if (permutation := getattr(operation, "input_permutation", None)) is not None:
                inputs = permutation
            elif not isinstance(operation, loading.Concatenate):
                order = _numbers(tensor) if order is None else order
                (order,) = operation.convert(
                    {pattern: order[:, None]}, [pattern], [pattern]
                ).values()
                order = order.reshape(-1)
        else:
            place = converter.source_patterns.index(pattern) if converter else 0
            plain = order is None or torch.equal(order, _numbers(tensor))
            source = _Source(tensor, None if plain else order, inputs)
            found.setdefault(parameter, []).append((place, source))
    return {
        name: [one for _, one in sorted(several, key=lambda at: at[0])]
        for name, several in found.items()
    }


def _by_names(model: Any, architecture: str, held: dict[str, FileTensor], older: Any) -> Sources:
    """As the older loader maps them: the names of the `gguf` package, then a class that changes
    values, of which the order of rows is learned from what it does to a matrix of row numbers."""
    text = model.config.get_text_config()
    config = text.to_dict() | {"n_head": text.num_attention_heads, "hidden_size": text.hidden_size}
    processor = older.TENSOR_PROCESSORS.get(architecture, older.TensorProcessor)(config=config)
    names = older.get_gguf_hf_weights_map(
        model, processor, model_type=architecture, num_layers=text.num_hidden_layers
    )
    found: Sources = {}
    for name in sorted(held, key=lambda one: "_up_" in one):  # gates lie before ups
        tensor, of_experts = held[name], name.removesuffix(".weight")
        parameter = names.get(name, names.get(of_experts))
        if parameter is None:
            continue
        if of_experts in names:
            found.setdefault(parameter, []).append(_Source(tensor))
            continue
        rows = np.broadcast_to(np.arange(tensor.shape[0], dtype=np.int32)[:, None], tensor.shape)
        done = processor.process(
            weights=rows, name=name, tensor_key_mapping=names, parsed_parameters={"tensors": {}}
        ).weights
        if done is rows:
            found[parameter] = [_Source(tensor)]
        elif done.shape == rows.shape and (done == done[:, :1]).all():
            found[parameter] = [_Source(tensor, torch.from_numpy(done[:, 0].astype(np.int64)))]
    return found


def _numbers(tensor: FileTensor) -> Tensor:
    return torch.arange(tensor.shape[0])


# --- modules --------------------------------------------------------------------------------------


class PermutedLinear(nn.Module):
    """A linear layer of x[..., permutation]: of blocks whose columns are in another order than the
    values of x. Blocks themselves are reordered instead where the order keeps each one whole."""

    def __init__(self, linear: QuantLinear, permutation: Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("permutation", permutation)

    def forward(self, x: Tensor) -> Tensor:
        """y [..., N] of x [..., K]."""
        return self.linear(x.index_select(-1, self.permutation))


def _in_order(blocks: Tensor, format: str, inputs: Tensor) -> Tensor | None:
    """The blocks with their columns in the order of the input; None where blocks would be cut."""
    fmt = FORMATS[format]
    runs = inputs.view(-1, fmt.elements)
    first = runs[:, :1]
    if (first % fmt.elements).any() or (runs != first + torch.arange(fmt.elements)).any():
        return None
    apart = blocks.view(len(blocks), -1, fmt.block_bytes)
    made = torch.empty_like(apart)
    made[:, first[:, 0] // fmt.elements] = apart
    return made.view(blocks.shape)


def _same(weight: Tensor, blocks: Tensor, format: str, inputs: Tensor | None = None) -> bool:
    """Whether a module's weight has the values of blocks, but for rounding to its dtype."""
    rows, blocks = weight.reshape(-1, weight.shape[-1]), blocks.reshape(-1, blocks.shape[-1])
    columns = None if inputs is None else torch.argsort(inputs).to(weight.device)
    step, allowed = max(1, VALUES // rows.shape[1]), ROUNDINGS * torch.finfo(weight.dtype).eps
    for first in range(0, len(rows), step):
        part = blocks[first : first + step].to(weight.device)
        values = dequantize(part, format, torch.float32)
        if columns is not None:
            values = values[:, columns]
        difference = (rows[first : first + step].float() - values).abs().amax(1)
        if not (difference <= allowed * values.abs().amax(1)).all():
            return False
    return True


_Names = list[tuple[str, str]]
"""A parameter under all its names, (module, attribute)."""


class _Stays(Exception):
    """Why a module is left as it is."""


class _Replacing:
    """One call of `use_gguf`."""

    def __init__(
        self,
        model: Any,
        path: str,
        found: dict[str, FileTensor],
        sources: Sources,
        options: dict[str, Any],
    ) -> None:
        self.model, self.path, self.found, self.sources = model, path, found, sources
        self.options = options
        try:
            known: Any = import_module("transformers.integrations.gguf.utils")
        except ImportError:
            known = None
        self.packed = SimpleNamespace(**{name: getattr(known, name, ()) for name in PACKED})
        self.taken: list[Taken] = []
        self.kept: list[tuple[str, str]] = []

    def run(self) -> Blocks:
        for names in self._weights():
            try:
                self._replace(names)
            except _Stays as why:
                self.kept += [(name, str(why)) for name in dict.fromkeys(n for n, _ in names)]
        used = {name for one in self.taken for name in one.tensors}
        blocks = [name for name, one in self.found.items() if _is_quantized(one)]
        unused = tuple(shown(name) for name in blocks if name not in used)
        return Blocks(self.path, tuple(self.taken), tuple(self.kept), unused)

    def _weights(self) -> list[_Names]:
        """Those of linear layers, embeddings and experts; tied ones together. Of experts the first
        parameter stands for both. None of them is held while it is looked at."""
        found: dict[int, _Names] = {}
        for name, module in self.model.named_modules(remove_duplicate=False):
            if self._is_experts(module):
                found.setdefault(id(module), []).append((name, EXPERTS[0]))
            elif isinstance(module, QuantLinear | QuantEmbedding):  # has blocks already
                continue
            elif isinstance(module, nn.Linear | nn.Embedding) or self._is_packed(module):
                found.setdefault(id(module.weight), []).append((name, "weight"))
        return [*found.values()]

    def _is_packed(self, module: Any) -> bool:
        return isinstance(module, (self.packed.GgufLinear, self.packed.GgufEmbedding))

    def _is_experts(self, module: Any) -> bool:
        given = [module._parameters.get(name) for name in EXPERTS]
        return all(one is not None and one.ndim == 3 for one in given)

    def _replace(self, names: _Names) -> None:
        modules = [self.model.get_submodule(name) for name, _ in names]
        for module in modules:
            if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
                raise _Stays("it has hooks, which the new one would not have")
        if self._is_experts(modules[0]):
            made, sources = self._experts(names[0][0], modules[0])
            new = [made] * len(modules)
            before = sum(getattr(modules[0], one).nbytes for one in EXPERTS)
        else:
            source, weight = self._source(names), modules[0].weight
            sources, before = [source], weight.nbytes
            blocks = _checked(weight, source, self._is_packed(modules[0]))
            of = {id(module): module for module in modules}
            layers = {key: self._made(module, source, blocks) for key, module in of.items()}
            new = [layers[id(module)] for module in modules]
        arrays = {array.data_ptr(): array for one in new for array in _arrays_of(one)}
        after = sum(one.nbytes for one in arrays.values())
        for (name, _), one, module in zip(names, new, modules, strict=True):
            parent, _, last = name.rpartition(".")
            setattr(self.model.get_submodule(parent), last, one.train(module.training))
        parts = tuple(one.tensor.name for one in sources)
        formats = tuple(dict.fromkeys(one.tensor.type for one in sources))
        said = ", ".join(dict.fromkeys(name for name, _ in names))
        self.taken.append(Taken(said, parts, formats, before, after))

    def _source(self, names: _Names) -> _Source:
        """The tensor of a weight; ValueError where there is none with blocks."""
        for name, attribute in names:
            found = self.sources.get(f"{name}.{attribute}")
            if found is not None and len(found) == 1:
                return found[0]
        raise _Stays("the file has no blocks for it that transformers maps to its name")

    def _made(self, module: Any, source: _Source, blocks: Tensor) -> Any:
        format, device = source.tensor.type, module.weight.device
        if isinstance(module, self.packed.GgufEmbedding):
            return QuantEmbedding(blocks.to(device), format, module.compute_dtype)
        if isinstance(module, nn.Embedding):
            return _embedding(module, blocks.to(device), format)
        if type(module) is not nn.Linear and not isinstance(module, self.packed.GgufLinear):
            raise _Stays(f"a {type(module).__name__} may do more than a Linear")
        ordered = blocks if source.inputs is None else _in_order(blocks, format, source.inputs)
        given = blocks if ordered is None else ordered
        try:
            layer = QuantLinear.from_bytes(given, format, module.bias, **self.options)
        except ValueError as error:
            raise _Stays(str(error)) from error
        if ordered is None:
            return PermutedLinear(layer, source.inputs).to(device)
        return layer.to(device)

    def _experts(self, name: str, module: Any) -> tuple[QuantExperts, list[_Source]]:
        sources = [one for part in EXPERTS for one in self.sources.get(f"{name}.{part}", ())]
        if len(sources) != 3:
            raise _Stays(
                "the file has no blocks for gates, ups and downs that transformers maps to it"
            )
        gate_up, down = (getattr(module, part).detach() for part in EXPERTS)
        parts, device = (*gate_up.chunk(2, 1), down), gate_up.device
        is_packed = isinstance(module, self.packed.GgufExperts)
        gates, ups, downs = (
            (_checked(part, source, is_packed), source.tensor.type)
            for part, source in zip(parts, sources, strict=True)
        )
        accuracy = self.options["accuracy"]
        made = QuantExperts(gates, ups, downs, module.act_fn, accuracy=accuracy)
        if not is_packed:
            _require_same_answers(module, made, down)
        return made.to(device), sources


def _checked(weight: Tensor, source: _Source, is_packed: bool) -> Tensor:
    """The blocks of a source, where a module's weight has these blocks, or their values."""
    tensor = source.tensor
    if tensor.type not in TAKEN:
        raise _Stays(
            f"{tensor.name} is {tensor.type}, which no kernel takes: QuantLinear.from_float "
            "quantizes the module's floats to another format"
        )
    blocks = source.blocks()
    if is_packed:
        same = torch.equal(blocks, weight.detach().cpu())
    elif weight.is_meta:
        raise _Stays("it is on the meta device, without values")
    elif weight.dtype not in operator.NAMES or tuple(weight.shape) != tuple(tensor.shape):
        raise _Stays(
            f"it is {weight.dtype} {list(weight.shape)} and {tensor.name} has shape "
            f"{list(tensor.shape)}"
        )
    else:
        same = _same(weight.detach(), blocks, tensor.type, source.inputs)
    if not same:
        raise _Stays(f"its {'blocks' if is_packed else 'values'} are not those of {tensor.name}")
    return blocks


def _embedding(module: Any, blocks: Tensor, format: str) -> QuantEmbedding:
    """The same embedding over blocks; a subclass of torch's may multiply its rows, as Gemma's."""
    if module.max_norm is not None:
        raise _Stays("its max_norm changes its weights")
    scale: Any = getattr(module, "embed_scale", None)
    scale = scale.detach().clone() if torch.is_tensor(scale) else scale
    if isinstance(scale, float):
        scale = torch.tensor(scale, device=blocks.device)
    made = QuantEmbedding(blocks, format, module.weight.dtype, scale)
    made.padding_idx = module.padding_idx
    if type(module) is not nn.Embedding:
        ids = torch.arange(min(4, len(blocks)), device=blocks.device)
        with torch.no_grad():
            wanted, got = module(ids), made(ids)
        if not _close(got, wanted):
            raise _Stays(f"a {type(module).__name__} does more than an Embedding")
    return made


def _require_same_answers(module: Any, made: QuantExperts, down: Tensor) -> None:
    """_Stays where experts do something else with the same weights, such as another gate.

    `made` is asked on the CPU, where it multiplies in float32: a GPU's kernels round x to 16 bits.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, down.shape[1], generator=generator).to(down.dtype)
    ids = torch.arange(2 * min(2, len(down))).view(2, -1) % len(down)
    asked = x, ids, torch.full(ids.shape, 0.5, dtype=down.dtype)
    with torch.no_grad():
        wanted = module(*(one.to(down.device) for one in asked))
        if not _close(made(*asked), wanted.cpu(), 64):
            raise _Stays(f"a {type(module).__name__} does more than gates, ups and downs")


def _close(got: Tensor, wanted: Tensor, roundings: int = ROUNDINGS) -> bool:
    if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        return False
    allowed = roundings * torch.finfo(wanted.dtype).eps * wanted.abs().amax().float()
    return bool(((got.float() - wanted.float()).abs() <= allowed).all())


def _arrays_of(module: Any) -> list[Tensor]:
    """What a module has of its weights on its device."""
    if isinstance(module, PermutedLinear):
        module = module.linear
    if isinstance(module, QuantLinear) and module.packed:
        return [array for arrays in module.packed.values() for array in arrays]
    return list(module.buffers())
