"""One lane of each row copies the activation scales to shared memory for the others, and no barrier
follows. Lane 0 usually runs first: on a GPU, where a warp moves together, and in a simulator that
takes lanes in ascending order. It fails with the next compiler, the next GPU, the next larger
thread block. The simulator takes lanes in ascending order too, and finds it all the same: it keeps
account of which stores a thread can know of, and no barrier tells the other lanes of this one."""

from __future__ import annotations

from numba import cuda, float32, int32

from steps.learn.pitfalls.exhibit import TILE, Pitfall, product
from steps.learn.pitfalls.right import half

MOST_BLOCKS = 16  # of a row, in shared memory


def kernel(synchronized):
    @cuda.jit
    def product_of_scales(w, q, d, s, c):
        scales = cuda.shared.array((TILE, MOST_BLOCKS), float32)
        n, m = cuda.grid(2)
        row = cuda.threadIdx.y
        # --- global -> shared
        if cuda.threadIdx.x == 0 and m < c.shape[0]:
            for b in range(d.shape[1]):
                scales[row, b] = d[m, b]
        if synchronized:  # <- the wrong one is not
            cuda.syncthreads()
        # --- multiply
        if m < c.shape[0] and n < c.shape[1]:
            total = float32(0)
            for b in range(d.shape[1]):
                at, dots = b * 18, int32(0)
                for j in range(16):
                    byte = int32(w[n, at + 2 + j])
                    dots += (byte & 15) * int32(q[m, b * 32 + j])
                    dots += (byte >> 4) * int32(q[m, b * 32 + 16 + j])
                total += half(w, n, at) * (scales[row, b] * float32(dots) - float32(8) * s[m, b])
            c[m, n] = total

    return product_of_scales


PITFALL = Pitfall(
    number=9,
    title="a missing barrier",
    story=__doc__,
    wrong=product(kernel(synchronized=False)),
    right=product(kernel(synchronized=True)),
    golden=141.0,  # right: the one lane that works is the one that copied
    caught_by=("race",),
)
