"""Launch templates: the launches of a product, compiled and laid out before any address is known.

    template = LaunchTemplate(choice, types_of_the_packed_weights)
    template(a, out, weights, zeros, workspace, stream)         # addresses; queued, not waited for

A template owns no memory. The caller brings some with each call: `zeroed` bytes that are zero and
that the kernels leave zero, and a workspace of `nbytes` that may hold anything. So layers of one
shape can share a template, calls on several streams do not meet, and what a CUDA graph writes can
come from that graph's pool. `steps.product.plan.Plan` is a template with memory of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from steps.compile.dry_run import (
    OUT,
    REGION,
    WEIGHTS,
    WORKSPACE,
    ZEROED,
    A,
    ArrayType,
    DryRun,
    launches,
)
from steps.contract import array_dtype
from steps.kernels.parts.activations.layouts import reading_of
from steps.product.choice import Choice, launch_configuration, written_dtype
from steps.product.operands import require_grid

if TYPE_CHECKING:
    from steps.driver.launcher import Loaded


class LaunchTemplate:
    """The launches of one product, to which every call brings its addresses.

    choice  : the step, and why.
    packing : name of the packing that its weights have.
    reads   : how A comes: "float32", "float16", "bfloat16" or "gated".
    writes  : dtype of C.
    adds_bias : whether a bias is one of the weights that a call brings, behind the packed ones.
    zeroed  : bytes of counters, which are zero between calls; 0 for a step without.
    nbytes  : bytes of a workspace; 0 where nothing needs it.
    loaded  : the launches of a call, in order.
    launches: the same, called with the addresses in the order (a, out, zeros, workspace, *weights).
    """

    def __init__(
        self,
        choice: Choice,
        weights: Sequence[ArrayType],
        *,
        output: str = "float32",
        input: str = "float32",
        bias: str | None = None,
    ) -> None:
        """Compile and load the kernels of `choice` on the current GPU.

        weights : (shape, dtype) of each array of the packed weights.
        output, input : of C and A, where the step can write and read them; else float32, or for
                  "gated" float16.
        bias    : dtype of a bias [N] that C is to have, if the step adds one (`Step.adds_bias`).
        ValueError for a product with more thread blocks than CUDA launches.
        """
        from steps.driver.launcher import load

        shape, memory = choice.shape, DryRun()
        self.packing = choice.step.pack.__name__
        self.adds_bias = bias is not None and choice.step.adds_bias
        if bias is not None and self.adds_bias:
            weights = (*weights, ((shape.n,), array_dtype(bias)))
        self.writes = written_dtype(choice.step, output)
        self.reads = reading_of(choice.step, input, choice.family)[1]
        before, own = launches(
            choice.work,
            (shape.m, shape.n, shape.k),
            output=self.writes,
            input=input,
            weights=weights,
            invariant=shape.invariant,
            machine=memory,
        )
        for launch in (*before, own):
            require_grid(launch, shape.m, shape.n)
        self.choice = replace(choice, configuration=launch_configuration(own))
        self.zeroed, self.nbytes = memory.zeroed, memory.nbytes
        self.loaded = [load(launch) for launch in (*before, own)]
        weights_at = (WEIGHTS + i * REGION for i in range(len(weights)))
        self.launches = RelocatableLaunches(self.loaded, (A, OUT, ZEROED, WORKSPACE, *weights_at))

    def __call__(
        self,
        a: int,
        out: int,
        weights: Iterable[int],
        zeros: int,
        workspace: int,
        stream: int,
    ) -> None:
        """Queue out[:] = a @ dequantize(W)^T on a stream; return before it is done.

        Addresses on the GPU, which nothing checks: a, [M, K] as the template `reads` it, at a
        multiple of 16 unless that is float32; out, [M, N], at a multiple of 16 and apart from a;
        the arrays of `packing`; `zeroed` bytes of zeros and `nbytes` of workspace, at multiples of
        256. Threads wait for each other. ValueError, and nothing is launched, where a kernel reads
        a through a tensor map and it is not at a multiple of 16.
        """
        self.launches((a, out, zeros, workspace, *weights), stream)


class RelocatableLaunches:
    """Loaded launches whose arrays are placeholders. Each call brings the addresses that they have.

    operands: where the placeholders of each operand begin, multiples of `dry_run.REGION`.
    """

    def __init__(self, loaded: Sequence[Loaded], operands: Sequence[int]) -> None:
        self._loaded = loaded
        self._places = [
            (one.arguments, i, which, offset)
            for one in loaded
            for which, operand in enumerate(operands)
            for i, offset in one.within(operand, REGION)
        ]
        self._mapped = [
            (one, which, offset)
            for one in loaded
            for which, operand in enumerate(operands)
            if (offset := one.mapped_within(operand, REGION)) is not None
        ]
        self._lock = threading.Lock()

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Queue the launches on a stream; `addresses` are in the order of the operands. Threads
        wait for each other. ValueError, and nothing is launched, for an address that a tensor map
        cannot have."""
        with self._lock:
            for loaded, which, offset in self._mapped:
                loaded.put_mapped(addresses[which] + offset)
            for arguments, i, which, offset in self._places:
                arguments[i] = addresses[which] + offset
            for loaded in self._loaded:
                loaded(stream)
