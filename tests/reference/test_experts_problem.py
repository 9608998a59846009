"""A problem of experts is, expert by expert, an ordinary one."""

from __future__ import annotations

import numpy as np
import pytest

from reference import ExpertsProblem, Problem, Reference, check, unquantized


def right(p: ExpertsProblem) -> np.ndarray:
    """C, row by row."""
    rows = [p.a[i : i + 1] @ p.w[e].T.astype(np.float64) for i, e in enumerate(p.ids.reshape(-1))]
    return np.concatenate(rows).astype(np.float32)


@pytest.mark.parametrize(("experts", "chosen"), [(5, 2), (5, 10), (1, 1)])
def test_each_row_is_of_the_expert_that_its_id_names(experts: int, chosen: int) -> None:
    p = ExpertsProblem(20, 6, 64, "q4_1", "integer", 3, "float16", experts, chosen)
    assert p.tokens.shape == (20 // chosen, 64)
    assert p.blocks.shape == (experts, 6, 2)
    assert p.ids.shape == (20 // chosen, chosen)
    assert set(np.unique(p.ids)) <= set(range(experts))
    np.testing.assert_array_equal(p.a[::chosen], p.tokens)
    found = check(right(p), p, "A16")
    assert found.ok, found.verdict
    assert found.compared == 120
    if experts > 1:
        wrong = right(p)
        wrong[[0, 19]] = wrong[[19, 0]]  # as if two rows had been exchanged
        assert not check(wrong, p, "A16").ok


def test_no_token_has_an_expert_twice_where_there_are_enough() -> None:
    ids = ExpertsProblem(80, 1, 32, "q4_0", experts=9, chosen=8).ids
    assert all(len(set(row)) == 8 for row in ids.tolist())
    assert len({tuple(row) for row in ids.tolist()}) > 1


def test_ids_are_the_same_in_every_format() -> None:
    one, other = (ExpertsProblem(8, 3, 32, f, experts=9, chosen=4).ids for f in ("q4_0", "q8_0"))
    np.testing.assert_array_equal(one, other)


def test_errors_are_of_the_weights_that_were_meant() -> None:
    p = ExpertsProblem(12, 40, 256, "q4_0", "normal", 1, "float32", 5, 3)
    reference = Reference(p)
    assert 0.005 < reference.nmse_weights < 0.011
    ids = p.ids.reshape(-1)
    meant = np.stack([unquantized(p.a[i : i + 1], p.w[e])[0] for i, e in enumerate(ids)])
    np.testing.assert_allclose(reference.meant, meant)


def test_rows_are_whole_tokens() -> None:
    with pytest.raises(ValueError, match="M=7 rows are no whole number of tokens with 2 of 5"):
        ExpertsProblem(7, 3, 32, "q4_0", experts=5, chosen=2)
    (part,) = Problem(3, 5, 32, "q4_0").by_weights(np.arange(2))
    np.testing.assert_array_equal(part[0], [0, 1])
