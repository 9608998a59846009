"""Work that Numba repeats while it compiles, done once: a third of a compilation's time.

A kernel here calls some 60 small device functions, and each of them goes through all of Numba's
passes. `SHORTCUTS` stand in for functions of numba-cuda 0.30.4 and Numba 0.68, both pinned, while
a kernel is compiled, and give what those give: the machine code is the same. What else the process
compiles goes the usual way. `tests/compile/test_numba_shortcuts.py` compares the code made with and
without them, and holds the functions they replace against the text they were written for.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, Final

from numba.core.types.functions import BaseFunction
from numba.cuda import dispatcher as numba_dispatcher
from numba.cuda import utils
from numba.cuda.codegen import CUDACodeLibrary
from numba.cuda.core import config, ir, postproc, transforms
from numba.cuda.core.base import BaseContext
from numba.cuda.core.targetconfig import ConfigStack, TargetConfig
from numba.cuda.dispatcher import CUDADispatcher

from steps.compile.kernel_key import text_of

_get_asm_str = CUDACodeLibrary.get_asm_str
_get_call_type = BaseFunction.get_call_type
_post_process = postproc.PostProcessor.run
_compile_one = CUDADispatcher.compile_device
_get_abi_sizeof = BaseContext.get_abi_sizeof


def _llvm_strs(library: Any) -> list[str]:
    """The text of each LLVM module once. A function that three others call is linked three times,
    and libNVVM would parse it as often."""
    if library._llvm_strs is None:
        library._llvm_strs = [str(module) for module in dict.fromkeys(library.modules)]
    return library._llvm_strs


def _names_in(library: Any, cc: Any = None) -> str:
    """What a kernel is searched for names of helpers to link, instead of its PTX: its LLVM text has
    the same. What is loaded is made of LTO-IR, so libNVVM would compile twice."""
    return _get_asm_str(library, cc) if config.CUDA_ENABLE_NRT else library.get_llvm_str()


_known: dict[tuple, tuple] = {}


def _typed_before(function: Any, context: Any, args: tuple, kws: dict) -> Any:
    """The signature of a call of a built-in function, remembered by its argument types. Numba tries
    every overload of `+` at each `+`, once while types are inferred and again while it lowers."""
    if kws:
        return _get_call_type(function, context, args, kws)
    key = id(function), tuple(args), context, ConfigStack.top_or_none()
    if key not in _known:
        signature = _get_call_type(function, context, args, kws)
        # the function itself, too: an id is of one object while that lives
        _known[key] = signature, function.get_impl_key(signature), function
    signature, implementation, _ = _known[key]
    function._impl_keys[signature.args] = implementation  # which another key may have changed
    return signature


_compiled: dict[tuple, Any] = {}


def _compile_device(dispatcher: Any, args: tuple, return_type: Any = None) -> Any:
    """The compiled device function of these argument types and this architecture, shared by all
    functions that are equal. Kernels are made by factories, for each tile anew, and many of their
    device functions are the same in all of them. Numba keeps what it compiled of each by itself,
    and for the first architecture alone."""
    if return_type is not None:
        return _compile_one(dispatcher, args, return_type)
    cc = numba_dispatcher.get_current_device().compute_capability
    own = dispatcher, args, cc
    if own not in _compiled:
        shared = text_of(dispatcher) or dispatcher, args, cc
        if shared not in _compiled:
            dispatcher.overloads.pop(args, None)  # of another architecture
            _compiled[shared] = _compile_one(dispatcher, args)
        _compiled[own] = _compiled[shared]
    made = dispatcher.overloads[args] = _compiled[own]
    return made


@lru_cache(maxsize=4096)
def _signature_of(function: Any) -> inspect.Signature:
    """Asked twice for each call of a function that is lowered."""
    return inspect.signature(function)


_sizes: dict[Any, int] = {}


def _size_of(context: Any, of: Any) -> int:
    """The bytes of an LLVM type: llvmlite parses a module for each answer."""
    if of not in _sizes:
        _sizes[of] = _get_abi_sizeof(context, of)
    return _sizes[of]


@cache
def _defaults(kind: Any) -> dict[str, Any]:
    return {name: option.default for name, option in kind.options.items()}


def _values(flags: Any) -> dict[str, Any]:
    """All options of a compilation: 27 properties, read a thousand times a kernel."""
    return _defaults(flags.__class__) | flags._values


def _flags_equal(flags: TargetConfig, other: Any) -> bool:
    if not isinstance(other, TargetConfig):
        return NotImplemented
    return flags is other or flags.values() == other.values()


def _flags_hash(flags: TargetConfig) -> int:
    """Numba's depends on the names of the options alone, too."""
    return hash(type(flags))


def _canonical(processor: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
    """The blocks in canonical form. Numba adds the variables alive at the entry of each block, nine
    times a function; only generators and the placing of `del` ask for them."""
    function = processor.func_ir
    if emit_dels or function.is_generator:
        return _post_process(processor, emit_dels, extend_lifetimes)
    function.blocks = transforms.canonicalize_cfg(function.blocks)
    function.variable_lifetime = postproc.VariableLifetime(function.blocks)  # computed if asked for
    function.generator_info = None
    return None


_OTHER, _VARIABLE, _INSTRUCTION, _ITEMS, _DICT = range(5)


@cache
def _kind(one: Any) -> int:
    """In the order in which Numba asks."""
    if issubclass(one, ir.var_types):
        return _VARIABLE
    if issubclass(one, ir.inst_types):
        return _INSTRUCTION
    return _ITEMS if issubclass(one, list | tuple) else _DICT if issubclass(one, dict) else _OTHER


def _variables_in(instruction: Any, value: Any) -> list:
    """The variables of an instruction's part, its type looked up once instead of four times: asked
    for 100 thousand times a kernel, and most parts are names, places and None."""
    kind = _kind(value.__class__)
    if kind == _OTHER:
        return []
    if kind == _VARIABLE:
        return [value]
    if kind == _INSTRUCTION:
        return value.list_vars()
    parts = value if kind == _ITEMS else value.values()
    return [
        variable
        for part in parts
        if _kind(part.__class__) != _OTHER
        for variable in _variables_in(instruction, part)
    ]


SHORTCUTS: Final = (
    (CUDACodeLibrary, "llvm_strs", property(_llvm_strs)),
    (CUDACodeLibrary, "get_asm_str", _names_in),
    (BaseFunction, "get_call_type", _typed_before),
    (CUDADispatcher, "compile_device", _compile_device),
    (BaseContext, "get_abi_sizeof", _size_of),
    (utils, "pysignature", _signature_of),
    (TargetConfig, "values", _values),
    (TargetConfig, "__eq__", _flags_equal),
    (TargetConfig, "__hash__", _flags_hash),
    (postproc.PostProcessor, "run", _canonical),
    (ir.Inst, "_rec_list_vars", _variables_in),
)
"""(class or module, name, what stands in for it)"""


@contextmanager
def replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes of classes and modules, while the block runs: (owner, name, value) each."""
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in replacements]
    for owner, name, value in replacements:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
