"""How a lesson on mixtures of experts reads what a caller has: A, and ids.

    C[p] = A[p // S] @ dequantize(W[ids[p]])[N, K]^T        of each pair p = 0 ... T S - 1

W is E matrices [N, K], blocks [E, N, K/32]; ids[T, S] say which S of them a token is multiplied
by. So M, the rows of C, is T S, and what holds of other products holds of these: C[M, N], and 2 M N
K operations. An ordinary product is that of one expert, E = S = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from steps.contract import Activations, Machine


@dataclass(frozen=True, slots=True)
class RowsByIds:
    """The activations of a lesson with `experts` and `chosen` at home, E and S: A[T, K] as the
    caller has it and ids, int32 [T, S].

    sorted_by: (A, ids, E, machine) -> what the launch gets of them, made by launches of the
        lesson's own; None where it gets (A, ids).
    """

    experts: int
    chosen: int
    sorted_by: Callable[[Any, Any, int, Machine], Activations] | None = None

    def __call__(
        self, a: Any, machine: Machine, ids: Any = None, experts: int | None = None
    ) -> Activations:
        """experts: how many W has. Without ids all rows are of one: an ordinary product."""
        if ids is None:
            ids, experts = machine.array(np.zeros((a.shape[0], 1), np.int32)), 1
        if self.sorted_by is not None:
            return self.sorted_by(a, ids, experts or self.experts, machine)
        return Activations((a, ids), layout="rows")
