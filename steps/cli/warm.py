"""Compiled kernels: `warm` makes those of a model or a product before they are needed, and `cache`
shows what is kept on disk, or removes it.
"""

from __future__ import annotations

import datetime
import itertools
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

from qformats import FILE_FORMATS, WEIGHT_FORMATS
from results.render import table
from results.render.table import Column
from steps.checks.select import UsageError
from steps.cli.arguments import formats_of, machines, refusing, require_blocks, require_compilable
from steps.cli.gguf_weights import tensors_of
from steps.cli.run import remark
from steps.compile import kernel_cache
from steps.compile.compiler import architecture, capability, compiled
from steps.compile.kernel_cache import MOST_BYTES, VARIABLE, Entry, folder_or_why
from steps.compile.parallel_compile import compile_ahead, missing_kernels
from steps.contract import FLOATS, H200_SMS
from steps.product.choice import Choice, Request, choose, packings

TOKENS: Final = (*range(1, 17), *range(24, 129, 8), *range(160, 513, 32), 768, 1024, 2048, 4096)
"""The M whose kernels are compiled where --m names none. Products of other M share them; where one
does not, its kernel is compiled when it is first launched."""

Weights = tuple[str, int, int, bool]
"""Format, N, K, and whether a layer with these weights has a bias."""


def warm(args: Namespace) -> int:
    """Compiles, on all cores, what `gemm` and `QuantLinear` launch; 1 if a kernel failed."""
    folder, why = folder_or_why()
    if folder is None:
        raise UsageError(f"compiled kernels are not kept: {why}")
    began, gpu, weights = time.monotonic(), _gpu(args), _weights(args)
    tokens, dtypes = args.m or TOKENS, (args.dtype,) if args.dtype else FLOATS
    wanted = list(products(weights, tokens, dtypes, args.accuracy, gpu))
    if not wanted:
        raise UsageError(f"no step multiplies {weights[0][0]} on {gpu.name}")
    missing, failed = missing_kernels(wanted, gpu.cc), []
    with table.progress(len(missing)) as progress:
        progress("kernels compiled", 0)
        report = lambda done, _: progress("kernels compiled", done)  # noqa: E731
        count = compile_ahead(wanted, gpu, remark, fewest=2, report=report)
        for kernel, signature in missing_kernels(wanted, gpu.cc):  # one, or on one core, or failed
            try:
                compiled(kernel, signature, architecture(gpu.cc))
                count += 1
            except Exception as error:  # of Numba and the linker, of many types
                failed.append(f"{kernel.__name__}: {' '.join(str(error).split())}")
            report(count, len(missing))
    seconds = time.monotonic() - began
    for sentence in failed:
        remark(sentence)
    print(
        f"compiled {count} kernels for {architecture(gpu.cc)} in {seconds:.0f} s; the others were "
        f"in {folder}"
    )
    return 1 if failed else 0


def _gpu(args: Namespace) -> Any:
    """The current GPU; with --arch one of that architecture with the SMs of an H200."""
    if args.arch:
        with refusing(ValueError):
            cc = capability(args.arch)[:2]
        require_compilable(args.arch)
        return SimpleNamespace(name=args.arch, cc=cc, sms=H200_SMS)
    _, machine, _ = machines("gpu")
    return machine(0)


def _weights(args: Namespace) -> list[Weights]:
    """What --gguf holds, or --format, --n and --k name, each once."""
    if args.gguf is None:
        if args.n is None or args.k is None:
            raise UsageError("name a model with --gguf, or weights with --n and --k")
        require_blocks(args.k)
        return [(name, args.n, args.k, args.bias) for name in formats_of(args.format)]
    if args.format or args.n or args.k or args.bias:
        raise UsageError("--format, --n, --k and --bias contradict --gguf: a file has its own")
    taken, tensors = (*WEIGHT_FORMATS, *FILE_FORMATS), tensors_of(args.gguf)
    found = {
        (one.type, *one.shape, f"{name.removesuffix('.weight')}.bias" in tensors)
        for name, one in tensors.items()
        if one.type in taken and len(one.shape) == 2
    }
    if not found:
        raise UsageError(f"{args.gguf} has no matrix in one of {', '.join(taken)}")
    return sorted(found)


def products(
    weights: Iterable[Weights],
    tokens: Iterable[int],
    dtypes: Iterable[str],
    accuracy: str,
    gpu: Any,
) -> Iterator[Choice]:
    """The products by the kernels that `gemm` chooses for blocks and for packed weights, and
    `QuantLinear` for its layouts."""
    for name, n, k, biased in weights:
        layouts = tuple(one.pack.__name__ for one in packings(name, gpu.cc, accuracy))
        for m, dtype in itertools.product(tokens, dtypes):
            called = Request(name, m, n, k, dtype, dtype, accuracy=accuracy)
            layer = replace(called, layouts=layouts, caller_casts=True)
            yield choose(layer, gpu)
            with suppress(ValueError):  # no kernel reads and writes this dtype here
                yield choose(called, gpu)
            for bias in {dtype, "float32"} if biased else ():
                yield choose(replace(layer, bias=bias), gpu)


# --- what is kept ---------------------------------------------------------------------------------


def cache(args: Namespace) -> int:
    """Shows what is kept, by kernel and architecture; with --clear, removes it."""
    folder, why = folder_or_why()
    if folder is None:
        print(f"compiled kernels are not kept: {why}")
        return 0
    removed = kernel_cache.clear(folder) if args.clear else 0
    found = sorted(kernel_cache.entries(folder), key=lambda one: (one.key["kernel"], -one.used))
    nbytes = sum(one.nbytes for one in found)
    if args.clear:
        print(f"removed {removed} files from {folder}")
    elif not found:
        print(f"no compiled kernels in {folder}")
    else:
        groups: dict[tuple[str, str], list[Entry]] = {}
        for one in found:
            groups.setdefault((one.key["kernel"], one.key["arch"]), []).append(one)
        title = f"{len(found)} compiled kernels in {folder}"
        table.show(table.of_records(COLUMNS, groups.values(), title))
        print(f"{_megabytes(nbytes)} of {_megabytes(MOST_BYTES)} at most; {VARIABLE} moves it")
    return 0


COLUMNS: Final = (
    Column("kernel", lambda own: own[0].key["kernel"], words=True),
    Column("for", lambda own: own[0].key["arch"], words=True),
    Column("variants", lambda own: str(len(own))),
    Column("size", lambda own: _megabytes(sum(one.nbytes for one in own))),
    Column("last used", lambda own: _time(own[0].used)),
)
"""Of the entries of one kernel and architecture, the one used last first."""


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB"


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
