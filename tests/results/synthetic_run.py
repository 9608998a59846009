"""An invented run shaped like a real one, to test charts and tables with. Not a result."""

from __future__ import annotations

from results.record.schema import (
    Clocks,
    Duel,
    Environment,
    Git,
    Limits,
    Peer,
    Row,
    Run,
    with_ratios,
)

LADDER = (
    # step, name, family, parent, unit, share of the unit's limit, title
    (1, "step01_naive_w4a16", "A16", None, "fp32", 0.018, "naive W4A16: one thread, one output"),
    (2, "step02_naive_w4a8", "A8", 1, "int32", 0.045, "naive W4A8: integer dot product"),
    (3, "step03_shared_tiled", "A16", 1, "fp32", 0.05, "shared-memory tiles"),
    (3, "step03_shared_tiled", "A8", 2, "int32", 0.12, "shared-memory tiles"),
    (4, "step04_dp4a_emulated", "A8", 3, "packed_int32", 0.13, "dot products packed"),
    (5, "step05_vectorized", "A8", 4, "packed_int32", 0.42, "128-bit accesses"),
    (6, "step06_dp4a", "A8", 5, "dp4a", 0.55, "dp4a: four products an instruction"),
    (7, "step07_tensor_core_int8", "A8", 6, "tensor_int8", 0.093, "int8 tensor cores"),
    (8, "step08_async_pipeline", "A8", 7, "tensor_int8", 0.157, "asynchronous pipeline"),
    (9, "step09_stream_k", "A8", 8, "tensor_int8", 0.171, "stream-K: an even share for every SM"),
    (10, "step10_decode", "A8", 9, "tensor_int8", 0.085, "decode: weights stream, one launch"),
    (11, "step11_w4a16_tensor_core", "A16", 3, "tensor_fp16", 0.58, "W4A16 on tensor cores"),
    (12, "step12_w4a16_wgmma", "A16", 11, "tensor_fp16", 0.83, "W4A16 with wgmma"),
    (13, "step13_w4a8_wgmma", "A8", 9, "tensor_int8", 0.73, "W4A8 with wgmma, one scale a row"),
    (14, "step14_w4a8_integer_scales", "A8", 13, "tensor_int8", 0.8, "W4A8 with integer scales"),
    (15, "step15_decode_bulk", "A8", 10, "tensor_int8", 0.04, "decode on Hopper: bulk copies"),
)
OVERLAPPING = (9, 10, 11, 12, 13, 14, 15)
IN_HALF = (11, 12, 13, 14)
ACCURACY = {13: "fast", 14: "coarse"}
ADDED = {"exact": 0.0, "fast": 1e-4, "coarse": 1e-3}
FORMATS = {"q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q8_0": 34}
NMSE = {"q4_0": 7.4e-3, "q4_1": 6.1e-3, "q5_0": 1.8e-3, "q5_1": 1.4e-3, "q8_0": 2.9e-5}
TOPS = {
    "fp32": 62.1,
    "int32": 31.5,
    "packed_int32": 63.0,
    "dp4a": 125.0,
    "tensor_int8": 1600.0,
    "tensor_fp16": 810.0,
}
SHAPES = tuple(
    (m, n, k)
    for m in (1, 8, 16, 128, 512, 4096)
    for n, k in ((4096, 4096), (4096, 14336), (14336, 4096))
)
TBPS = 4.26
PACES = ("sustained", "burst")


def make_row(
    entry, name: str, shape: tuple[int, int, int], wobble: float, output: str = "float32"
) -> Row:
    step, module, family, parent, unit, share, title = entry
    m, n, k = shape
    weights = n * k // 32 * FORMATS[name]
    moved = weights + m * k * (4 if family == "A16" else 1.25) + int(output[-2:]) // 8 * m * n
    operations = 2 * m * n * k
    reach = {9: 0.35, 10: 0.85, 15: 0.95, 11: 0.4, 12: 0.45, 13: 0.45, 14: 0.45}.get(
        step, min(0.2, 3 * share)
    )
    tokens = max(m, 16 if step >= 7 else 1)  # tiles are multiplied whole
    work = 2 * tokens * n * k / (TOPS[unit] * share * 1e6)
    us = max(moved / (TBPS * reach * 1e6), work, 2.5)
    us *= 0.96 if output == "float16" else 1.0
    us *= wobble * (1.06 if name.startswith("q5") else 1.0)
    activation = 0.0 if (family == "A16" and step < 11) or step == 10 else max(1.5, m * k * 5 / 3e6)
    return Row(
        step=step,
        name=module,
        title=title,
        parent=parent,
        unit=unit,
        scheme=f"W{name[1]}{family}",
        format=name,
        M=m,
        N=n,
        K=k,
        output=output,
        accuracy=ACCURACY.get(step, "exact"),
        status="ok",
        kernel_us=us,
        activation_us=activation,
        total_us=us + activation,
        chain_us=us + activation - 0.9 if step in OVERLAPPING else None,
        pack_us=12000.0 * step,
        launch_us=21.0,
        p20_us=us * 0.995,
        p80_us=us * 1.01,
        samples=12,
        timing="graph",
        sm_mhz=1980.0,
        tflops=operations / us * 1e-6,
        gbps=moved / us * 1e-3,
        limit_share=share,
        nmse_same_operands=2e-13 * (1 + step),
        nmse_float=NMSE[name]
        + (ADDED[ACCURACY[step]] if step in ACCURACY else 3e-5 if family == "A8" else 0.0),
        registers=32 + 8 * step,
        spill_bytes=0,
        smem_bytes=2048 * step,
        source_hash=f"{step:012x}",
    )


def cublas_us(m: int, n: int, k: int) -> float:
    return max(2 * n * k / 3.6e6, 2 * m * n * k / 690e6)


def make_duel(row: Row, pace: str) -> Duel:
    """Sustained as the row, in bursts a tenth faster, and the rival a twelfth."""
    us, rival = row.kernel_us, cublas_us(row.M, row.N, row.K)
    if pace == "burst":
        us, rival = us * 0.9, rival * 11 / 12
    return Duel(
        step=row.step,
        name=row.name,
        scheme=row.scheme,
        format=row.format,
        M=row.M,
        N=row.N,
        K=row.K,
        output=row.output,
        accuracy=row.accuracy,
        rival="cublas_fp16",
        pace=pace,
        status="ok",
        rounds=15 if pace == "burst" else 100,
        us=us,
        p20_us=us * 0.99,
        p80_us=us * 1.01,
        rival_us=rival,
        rival_p20_us=rival * 0.99,
        rival_p80_us=rival * 1.01,
        x_rival=rival / us,
        x_rival_p20=rival / us * 0.99,
        x_rival_p80=rival / us * 1.01,
        pause_us=20000.0 if pace == "burst" else 0.0,
        sm_mhz=1980.0 if pace == "burst" else 1485.0,
        source="torch 9.9",
        source_hash=row.source_hash,
    )


def make_run(shapes=SHAPES, formats=tuple(FORMATS), ladder=LADDER, peers: bool = True) -> Run:
    rows = with_ratios(
        make_row(entry, name, shape, 1 + 0.02 * i, output)
        for entry in ladder
        for i, name in enumerate(formats)
        for shape in shapes
        for output in (("float32", "float16") if entry[0] in IN_HALF else ("float32",))
    )
    duels = tuple(
        make_duel(row, pace) for row in rows if row.step in IN_HALF for pace in PACES if row.M >= 16
    )
    others = []
    for m, n, k in shapes if peers else ():
        operations = 2 * m * n * k
        others.append(
            Peer(
                peer="cublas_fp16",
                format="f16",
                M=m,
                N=n,
                K=k,
                us=cublas_us(m, n, k),
                same_run=True,
                source="torch 9.9, kernel only",
            )
        )
        if (m, n) == (16, 4096) and k == 4096:
            continue  # published figures have holes
        others += [
            Peer(
                peer="ggml",
                format=name,
                M=m,
                N=n,
                K=k,
                us=max(n * k // 32 * size / 2.2e6, operations / (180e6 + 1e6 * i)),
                same_run=False,
                source="invented",
            )
            for i, (name, size) in enumerate(FORMATS.items())
            if name in formats
        ]
    env = Environment(
        gpu="NVIDIA H200",
        cc=(9, 0),
        sms=132,
        power_limit_w=700.0,
        clocks_mhz=Clocks(before=345.0, after=1980.0, max=1980.0),
        copy_tbps=TBPS,
        limits=Limits(copy_tbps=TBPS, read_tbps=4.35, tops=TOPS),
        git=Git(sha="0123abcd", dirty=False),
        utc="2026-01-02T03:04:05Z",
    )
    return Run(env=env, rows=rows, peers=tuple(others), duels=duels if peers else ())
