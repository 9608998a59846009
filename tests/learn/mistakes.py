"""Two plausible mistakes for every hole of every exercise, and what the check must make of each.

A mistake changes the step's own lines of a hole: each `old` becomes `new`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from steps.learn.exercises.text import Exercise, make, solutions
from steps.registry import find


@dataclass(frozen=True, slots=True)
class Mistake:
    """`cause` is what the diagnosis must say; `says` a part of its message."""

    step: int
    hole: int
    old: str
    new: str
    cause: str
    says: str = ""

    @property
    def id(self) -> str:
        return f"step{self.step:02d}-hole{self.hole}-{self.cause.replace(' ', '_')}"

    def written(self, folder: Path, *others: int) -> Exercise:
        """The exercise with this hole filled, wrongly, and others as they should be, as a file in
        the folder."""
        right = "".join(solutions(self.step)[self.hole].body)
        times = right.count(self.old)
        assert times == 1, f"{self.id}: {self.old!r} is there {times} times"
        step, end = find(self.step), f"# end of TODO {self.hole}\n"
        mine, rest = make(step, {self.hole, *others}).split(end)
        before, body, after = mine.rpartition(right)
        assert body
        path = folder / f"{step.name}.py"
        wrong = right.replace(self.old, self.new)
        path.write_text(f"{before}{wrong}{after}{end}{rest}", encoding="utf-8")
        return Exercise.read(path)


MISTAKES = (
    Mistake(1, 1, "m >= c.shape[0] or n >= c.shape[1]", "m >= c.shape[0]", "out of range"),
    Mistake(1, 1, "n, m = cuda.grid(2)", "m, n = cuda.grid(2)", "not written", "column"),
    Mistake(1, 2, "n * blocks_k + b", "n + b", "weights of a wrong block"),
    Mistake(1, 2, "(n * blocks_k + b) * block_bytes", "b * block_bytes", "one row of weights"),
    Mistake(1, 3, " + z)", ")", "no compensation", "pitfall 1"),
    Mistake(1, 3, "b * elements + j", "j", "activations of one block"),
    Mistake(1, 4, "c[m, n]", "c[n, m]", "out of range", "m first"),
    Mistake(1, 4, "c[m, n] = acc", "c[m, n] += acc", "added to"),
    Mistake(1, 5, "ceil_div(shape.n, BLOCK_N)", "shape.n // BLOCK_N", "grid", "pitfall 12"),
    Mistake(
        1,
        5,
        "(ceil_div(shape.n, BLOCK_N), ceil_div(shape.m, BLOCK_M))",
        "(ceil_div(shape.m, BLOCK_M), ceil_div(shape.n, BLOCK_N))",
        "not written",
        "pitfall 12",
    ),
    Mistake(
        2,
        1,
        "at = (n * blocks_k + b) * block_bytes",
        "at = (m * blocks_k + b) * block_bytes",
        "weights of row m",
    ),
    Mistake(2, 1, "BLOCK_Q8_1", "block_bytes", "misaligned", "pitfall 7"),
    Mistake(
        2,
        2,
        "b4(a, at_a + QA + HALF + i)",
        "b4(a, at_a + QA + 4 + i)",
        "wrong pairs",
        "weights 28 to 31",
    ),
    Mistake(2, 2, "int8(low >> (8 * j))", "(low >> (8 * j)) & 255", "activations unsigned"),
    Mistake(2, 3, " + offset(w, at) * s", "", "no compensation", "pitfall 1"),
    Mistake(2, 3, "at_a + 2)", "at_a)", "scales exchanged"),
    Mistake(3, 1, "            cuda.syncthreads()\n", "", "race", "pitfall 9"),
    Mistake(3, 1, " + offset(w, at)", "", "no compensation", "pitfall 1"),
    Mistake(3, 2, "tile_w[tx, j]", "tile_w[ty, j]", "weights of row m"),
    Mistake(
        3, 2, "            cuda.syncthreads()\n", "                cuda.syncthreads()\n", "barrier"
    ),
    Mistake(3, 3, " and n0 + tx < c.shape[1]", "", "out of range"),
    Mistake(3, 3, "c[m0 + ty, n0 + tx]", "c[m0 + tx, n0 + ty]", "out of range"),
    Mistake(
        3,
        4,
        "if tx == 0",
        "if tx == 1 and ty > 0",
        "nan",
        "`scale_a[ty] = half_to_float(da)`: is its branch right?",
    ),
    Mistake(
        3, 4, "at + QA + tx", "at + tx", "wrong pairs", "multiplied with what is no element of A"
    ),
    Mistake(3, 5, "            cuda.syncthreads()\n", "", "race"),
    Mistake(3, 5, "offset_w[ty] = z", "offset_w[ty] = 0", "no compensation"),
    Mistake(3, 6, " + offset_w[tx] * sum_a[ty]", "", "no compensation"),
    Mistake(3, 6, "acc += scale_w", "acc = scale_w", "last block alone"),
    # --- 4
    Mistake(
        4,
        1,
        "0x9144",
        "0x8144",
        "high bit of another",
        "element 1 of A meets weight 1, with the highest bit of weight 0 in place",
    ),
    Mistake(4, 1, "0xAAA2", "0xAA2A", "wrong elements", "element 2 of A gives products"),
    Mistake(
        4,
        2,
        "0x9991",
        "0x8880",
        "wrong pairs",
        "element 0 of A meets weight 0 and weight 1; likewise 4, 8",
    ),
    Mistake(
        4, 2, "int32(a3 + a2)", "int32(a1 + a2)", "wrong pairs", "element 3 of A meets nothing"
    ),
    Mistake(4, 3, "4 * i", "i", "misaligned"),
    Mistake(4, 3, "tile_a[row, 2 * i + 1]", "tile_a[row, i + 1]", "race"),
    Mistake(4, 4, "(t - STAGE_A) // (WORDS // 2)", "t // (WORDS // 2)", "out of range", "tile_w["),
    Mistake(4, 4, "WORDS + 2 * i] ", "2 * i + 2] ", "race"),
    Mistake(4, 5, "int32(ROUND)", "int32(0)", "rounded down"),
    Mistake(4, 5, " + offset_w[tx] * sum_a[ty]", "", "no compensation", "pitfall 1"),
    # --- 5
    Mistake(
        5,
        1,
        "first - centre_pair",
        "first",
        "centre of the codes",
        "elements 0 to 1 of A meet weights 0 to 1, each 8 too high",
    ),
    Mistake(5, 1, "(p + 1) * bn + row", "p * bn + row + 1", "race", "race on tile_w["),
    Mistake(5, 2, "p * bn + TN * tx", "p * bn + tx", "misaligned"),
    Mistake(
        5,
        2,
        "v[i + r, 3] = multiply_add(v[i + r, 3], xa[r], w[3])",
        "v[i + r, 3] = multiply_add(v[i + r, 3], xa[r], w[2])",
        "weights of another row",
        "Column 3 of C takes the weights of row 2 of W",
    ),
    Mistake(5, 3, "compensated and part == 0", "compensated", "compensated twice"),
    Mistake(
        5,
        3,
        "float32(v[i, 0] >> int32(shift))",
        "float32(v[i, 0])",
        "bits of another",
        "65536 times",
    ),
    # --- 6
    Mistake(
        6,
        1,
        "uint32(word) | uint32(SIGNS)",
        "uint32(word)",
        "bits of another",
        "-1 where weights 0 to 2 are negative",
    ),
    Mistake(6, 1, "centre * ONES", "centre", "centre of the codes", "elements 1 to 3 of A"),
    Mistake(
        6,
        2,
        "uint32(word >> 4) & uint32(NIBBLES)",
        "uint32(word >> 4)",
        "bits of another",
        "meet 16 times weights 1 to 3 and weights 16 to 18",
    ),
    Mistake(
        6,
        2,
        "BLOCK // 2 + 4 * i",
        "4 * i + 4",
        "high bit of another",
        "highest bit of weights 4 to 19",
    ),
    Mistake(6, 3, "dp4a(xa[r], w[1], v[i + r, 1])", "dp4a(xa[r], w[1], 0)", "part of a block"),
    Mistake(
        6,
        3,
        "dp4a(xa[r], w[3], v[i + r, 3])",
        "dp4a(xa[r], w[2], v[i + r, 3])",
        "weights of another row",
        "Column 3 of C takes the weights of row 2 of W",
    ),
    Mistake(6, 4, "d0 * da *", "d0 *", "no scale of the activations"),
    Mistake(6, 4, "token(i, ty)", "i", "scale da of another row", "Row 1 of C takes"),
    Mistake(6, 5, "if N % TN == 0 and n < N", "if n < N", "out of range"),
    Mistake(6, 5, "if n + j < N", "if n < N", "out of range"),
    # --- 7
    Mistake(
        7,
        1,
        " + lane",
        " + lane % 4",
        "activations of another row",
        "Row 1 of C takes the activations of row 0",
    ),
    Mistake(7, 1, "first + 4 * bm", "first + 4", "activations of another row", "at K 16 to 31"),
    Mistake(
        7,
        2,
        "w8 * da * float32(c2)",
        "w * da * float32(c2)",
        "scale d of another row",
        "Columns 8 to 15 of C take the scale d of rows 0 to 7 of W in rows 0, 2, 4, 6 ...",
    ),
    Mistake(7, 2, "2 * (lane % 4)", "lane % 4", "misaligned"),
    Mistake(
        7,
        3,
        "(2 * k + chunk) * M + m",
        "(2 * k + chunk) + m",
        "activations of another row",
        "of rows 1 to 2 of A at K 16 to 31",
    ),
    Mistake(7, 3, "(chunk * bm + row) * 4", "chunk * bm + row", "misaligned"),
    Mistake(7, 4, "i // 2 * 8", "i // 2", "race"),
    Mistake(7, 4, " and feature < N", "", "out of range"),
    # --- 8
    Mistake(
        8,
        1,
        "x[2], x[3]",
        "x[3], x[2]",
        "words in a wrong place",
        "Bytes 8 to 11 of stage hold what belongs to bytes 12 to 15; bytes 12 to 15 of stage hold "
        "what belongs to bytes 8 to 11; likewise in ",
    ),
    Mistake(8, 1, "load_u32x4(array, offset)", "load_u32x4(array, offset + 4)", "misaligned"),
    Mistake(
        8,
        2,
        "(lane >> 4) * 8",
        "(lane >> 4)",
        "activations of another row",
        "Rows 8 to 15 of C take the activations of rows 1 to 8",
    ),
    Mistake(8, 2, ") * CHUNK", ")", "misaligned"),
    Mistake(8, 3, "            cuda.syncthreads()\n", "", "race"),
    Mistake(8, 3, "copy_tokens(stage, 16 * t,", "copy_tokens(stage, 16,", "race"),
    Mistake(
        8,
        4,
        "load_token_scales(token_scales, stage, scales_at, 1)",
        "load_token_scales(token_scales, stage, scales_at, 0)",
        "scale da of another block",
        "K 32 to 63 are multiplied with the scale da of block 0",
    ),
    Mistake(
        8,
        4,
        "            load_weights(a, stage, weights_at, lane, 1)\n",
        "",
        "weights of another K",
        "K 64 to 95 of A meets the weights of K 0 to 31",
    ),
    # --- 9
    Mistake(
        9,
        1,
        "            cp_async_commit()",
        "                cp_async_commit()",
        "copy not awaited",
        "0 groups after",
    ),
    Mistake(9, 1, "step * stage_bytes + 16 * t, w", "16 * t, w", "copy overwritten"),
    Mistake(
        9,
        2,
        "            cuda.syncthreads()\n",
        "",
        "copy not awaited",
        "Either the wait or the barrier",
    ),
    Mistake(
        9,
        2,
        "            wait_for_next()\n",
        "",
        "copy not awaited",
        "so cp_async_wait(2) or less waits",
    ),
    Mistake(9, 3, "stage == ring_bytes", "stage > ring_bytes", "out of range"),
    Mistake(
        9,
        3,
        "            if stage == ring_bytes:\n                stage = int32(0)\n",
        "",
        "out of range",
    ),
    Mistake(9, 4, "step + stages < count", "step < count", "out of range"),
    Mistake(9, 4, "            to = int32(stage + 16 * t)\n", "", "copy overwritten"),
    # --- 11
    Mistake(
        11,
        1,
        "(at ^ (32 * step))",
        "(at + 32 * step)",
        "weights of another K",
        "K 16 to 31 of A meets the weights of K 48 to 63",
    ),
    Mistake(
        11,
        1,
        "4 * j * ROW",
        "j * ROW",
        "activations of another row",
        "Rows 16 to 31 of C take the activations of rows 4 to 19",
    ),
    Mistake(
        11,
        2,
        "step >> 1",
        "step & 1",
        "scale d of another block",
        "K 16 to 31 are multiplied with the scale d of block 1",
    ),
    Mistake(11, 2, "4 * (i * columns + j)", "4 * (i + j)", "wrong place"),
    Mistake(
        11,
        3,
        "            cp_async_commit()",
        "                cp_async_commit()",
        "copy not awaited",
        "0 groups after",
    ),
    Mistake(
        11,
        3,
        "group + step",
        "group",
        "weights of another K",
        "K 128 to 255 of A meets the weights of K 0 to 127",
    ),
    Mistake(11, 4, "                cuda.syncthreads()\n", "", "race"),
    Mistake(11, 4, "                wait_for_next()\n", "", "copy not awaited", "3 groups after"),
    # --- 12
    Mistake(12, 1, "        wgmma_fence()  # registers written so far may be read\n", "", "rule"),
    Mistake(
        12,
        1,
        "b + 3 * NEXT_16_K",
        "b + 2 * NEXT_16_K",
        "weights of another K",
        "K 48 to 63 of A meets no weights",
    ),
    Mistake(
        12,
        2,
        "            cp_async_commit()",
        "                cp_async_commit()",
        "copy not awaited",
        "0 groups after",
    ),
    Mistake(12, 2, "step * stage_bytes + 2 * box", "step * stage_bytes + box", "race"),
    Mistake(12, 3, "            fence_proxy_async()", "            #", "race"),
    Mistake(12, 3, "            cuda.syncthreads()", "            #", "race"),
    Mistake(
        12,
        4,
        "group + ahead",
        "group + step",
        "weights of another K",
        "K 384 to 671 of A meets the weights of K 0 to 287",
    ),
    Mistake(
        12,
        4,
        "            cp_async_commit()",
        "                cp_async_commit()",
        "copy not awaited",
        "1 group after",
    ),
    Mistake(
        12,
        5,
        "b + box // 16",
        "b + box",
        "nan",
        "`acc = multiply(acc, ring, base + weights_at, lane, 1, b + box)`, and nobody has stored "
        "to it: shared memory begins as NaN. Stored to are ring[0] to [13311]",
    ),
    Mistake(12, 5, "            acc = wait_for_products(acc)\n", "", "rule"),
    # --- 17
    Mistake(17, 1, "            walk = advance(walk, part)\n", "", "copy overwritten"),
    Mistake(
        17,
        1,
        "lane), at + 16 * lane",
        "lane), at",
        "words in a wrong place",
        "Bytes 16 to 31 of smem hold what belongs to bytes 0 to 15",
    ),
    Mistake(17, 2, "                wait_for_oldest()\n", "", "copy not awaited", "1 group after"),
    Mistake(17, 2, "                cuda.syncwarp()\n", "", "race"),
    Mistake(17, 3, "                cuda.syncwarp()\n", "", "race"),
    Mistake(
        17,
        3,
        "                if slot == ring_end:\n                    slot = ring\n",
        "",
        "copy not awaited",
    ),
    Mistake(
        17,
        4,
        "            finish(acc)\n",
        "",
        "part of K",
        "K 32 to 127, K 160 to 255, K 288 to 383",
    ),
    Mistake(17, 4, "PAIR * warps_n", "warps_n", "wrong place"),
    Mistake(17, 5, "        cuda.syncthreads()\n", "", "race"),
    Mistake(17, 5, "cuda.syncthreads()", "cuda.syncwarp()", "race"),
)
