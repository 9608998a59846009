"""results/RESULTS.md: every table that is too wide or too long for the README, for every GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from results.record import ROOT
from results.record.schema import AsCalled, Environment, ModelRun, Row, Run, Size
from results.record.store import headline, read, runs
from results.render import charts, models
from results.render.arguments import NOTHING
from results.render.charts import tokens
from results.render.markdown import grid, link
from results.render.query import (
    ABSENT,
    BASELINES,
    CLIFF,
    CUBLAS,
    LAYERS,
    LLAMA_CPP,
    UNITS,
    baseline,
    baseline_us,
    called,
    cell,
    cliffs,
    dims,
    formats,
    in_order,
    jump,
    kind_name,
    main_format,
    number,
    percent,
    ratio,
    span,
    sweep,
    tabled,
    timed,
    tops,
    when,
)
from results.render.staleness import STALE, Keys, stale_keys
from results.render.text import error
from steps.contract import BRANCHES

NAME: Final = "RESULTS.md"
HEAD: Final = """# Results

All that was measured, one section per GPU. `make charts` writes this file from the `run.json` files
beside it; nobody edits it. README.md says how it is measured.
"""
CALLS: Final = (
    ("gemm.plan", "exact", "float32"),
    ("gemm.plan", "exact", "float16"),
    ("gemm.plan", "exact", "bfloat16"),
    ("QuantLinear", "exact", "float32"),
    ("QuantLinear", "exact", "float16"),
    ("QuantLinear", "exact", "bfloat16"),
    ("QuantLinear", "fast", "float16"),
    ("QuantLinear", "fast", "bfloat16"),
)
"""The columns of calls: (api, accuracy, dtype of A and C)."""
COMPARED: Final = tuple(kind for kind in CALLS if kind[0] == "QuantLinear" and kind[2] != "float32")
"""Those that are told of all formats at once."""


def page(root: Path = ROOT) -> str:
    """The file, for the runs in `root`: the one that the README shows first."""
    folder = root / "results"
    first = headline(folder)
    if first is None:
        return f"{HEAD}\n{NOTHING}\n"
    others = [path for path in runs(folder) if path != first]
    return "\n".join(
        [HEAD, *(text for path in (first, *others) for text in _gpu(path, root, path == first))]
    )


def _gpu(path: Path, root: Path, pictured: bool) -> list[str]:
    run = read(path)
    stale = stale_keys(run, root)
    records: list[Row | AsCalled] = [*run.rows, *run.as_called]
    lines = [
        f"## {run.env.where}",
        "",
        f"From [{path.parent.name}/{path.name}]({link(path, (root / 'results').resolve())}): "
        f"{len(run.rows)} rows of steps, {len(run.as_called)} of calls"
        + (f", {when(records)}" if when(records) else "")
        + ".",
        "",
    ]
    if pictured:
        for name in charts.plans(run):
            lines += [f"![{name}](charts/{name}.svg)", ""]
    for title, made in (
        ("What a caller gets", _calls(run, stale)),
        ("Every number of tokens", _swept(run, stale)),
        ("A model of transformers", models.of_transformers(path.with_name(ModelRun.NAME))),
        ("A decoder", models.of_decoder(path.with_name(models.DECODER))),
        ("Two GPUs and more", models.of_gpus(path.with_name(models.GPUS))),
        ("How near a real model stays", models.of_quality(path.with_name(models.QUALITY))),
        ("Each step at its home shapes", _homes(run, stale)),
        ("The last step of each branch at every shape", _everywhere(run, stale)),
        ("Baselines", _baselines(run)),
        ("Limits of this GPU", _limits(run.env)),
        ("Environment", _environment(run.env)),
        ("Failed, not possible, stale", _exceptions(run, stale)),
    ):
        if made:
            lines += [f"### {title}", "", *made, ""]
    return lines


def _mark(one: Row | AsCalled, stale: Keys) -> str:
    return f" {STALE}" if one.key in stale else ""


# ------------------------------------------------------------------------------ what a caller gets


def _calls(run: Run, stale: Keys) -> list[str]:
    calls = tabled(run)
    if not calls:
        return []
    text = [
        "GPU time of one call in us, tensor in to tensor out, casts and passes included; then how "
        "many times as fast as torch with dequantized weights in the same loop. The dtype is that "
        "of A and C; llama.cpp has float32, Humming float16.",
        "",
        *_least(calls),
    ]
    for name in formats(calls):
        text += ["", f"#### {name.upper()}", "", *_of_format(run, name, stale)]
    name = main_format(calls)
    for kind in CALLS:
        own = [one for one in calls if _kind(one) == kind and one.format == name]
        if own:
            title = f"#### {kind_name(kind)}, {name.upper()}, in detail"
            text += ["", title, "", *_call_lines(own, stale)]
    return text


def _least(calls: Sequence[AsCalled]) -> list[str]:
    """A line per M: the least ratio over all N x K, a range where formats differ."""
    kinds = [kind for kind in COMPARED if any(_kind(one) == kind for one in calls)]
    lines = []
    for m in sorted({one.M for one in calls}):
        cells = []
        for kind in kinds:
            own = [one for one in calls if _kind(one) == kind and m == one.M]
            worst = (min(c.x_cublas for c in own if c.format == name) for name in formats(own))
            cells.append(span(worst))
        lines.append([str(m), *cells])
    head = ["M", *map(kind_name, kinds)]
    return [
        "The least over all N x K, from the format where it is least to the one where it is most:",
        "",
        *grid(head, "r" * len(head), lines),
    ]


def _of_format(run: Run, name: str, stale: Keys) -> list[str]:
    """A line per size: every way of calling in one format, beside the baselines."""
    calls = [one for one in tabled(run) if one.format == name]
    columns = [each for each in CALLS if any(_kind(one) == each for one in calls)]
    sizes = in_order(one.shape for one in calls)
    others = {LLAMA_CPP: BASELINES[LLAMA_CPP]} | (
        LAYERS if name == main_format(tabled(run)) else {}
    )
    known = [one for one in others if any(baseline_us(run, one, name, size) for size in sizes)]
    lines = []
    for size in sizes:
        own = [called(run, *each, size, name) for each in columns]
        theirs = next((one.cublas_us for one in own if one and one.dtype == "float16"), None)
        lines.append(
            [
                *map(str, size),
                *(
                    f"{number(one.us)}, {ratio(one.x_cublas)}{_mark(one, stale)}" if one else ABSENT
                    for one in own
                ),
                cell(theirs),
                *(cell(baseline_us(run, other, name, size)) for other in known),
            ]
        )
    head = ["M", "N", "K", *map(kind_name, columns), BASELINES[CUBLAS]]
    head += [others[other] for other in known]
    return grid(head, "r" * len(head), lines)


def _call_lines(calls: Sequence[AsCalled], stale: Keys) -> list[str]:
    """With the spread, the host's time and the step that was chosen."""
    order = {size: i for i, size in enumerate(in_order(one.shape for one in calls))}
    head = ["M", "N", "K", "us", "20-80 %", "torch us", "x torch"]
    head += ["host us", "torch host us", "step", "rounds"]
    lines = [
        [
            *map(str, one.shape),
            number(one.us) + _mark(one, stale),
            f"{number(one.p20_us)}-{number(one.p80_us)}",
            number(one.cublas_us),
            ratio(one.x_cublas),
            cell(one.host_us),
            cell(one.torch_host_us),
            str(one.step),
            str(one.rounds),
        ]
        for one in sorted(calls, key=lambda one: order[one.shape])
    ]
    return grid(head, "r" * len(head), lines)


def _swept(run: Run, stale: Keys) -> list[str]:
    """Where a step is chosen at the M of the sweep, and where time jumps."""
    drawn = tokens.sizes(run)
    if not drawn:
        return []
    old = any(one.swept and one.key in stale for one in run.as_called)
    lines = []
    for n, k in drawn:
        for accuracy, label, _ in tokens.LINES:
            own = sweep(run, accuracy, n, k)
            told = (f"{step} (M={low}-{high})" for step, low, high in tokens.ranges_of_steps(own))
            lines.append([label, f"{n} x {k}", ", ".join(told)])
    found = cliffs(run)
    jumps = [f"- {jump(one, more)}" for one, more in found]
    most = f"{CLIFF:g} times"
    return [
        f"Time against M is drawn in tokens.svg{f' {STALE}' * old}. The step that was chosen:",
        "",
        *grid(["", "N x K", "steps"], "lll", lines),
        "",
        f"One token more takes more than {most} as long here:"
        if found
        else f"Nowhere does one token more take more than {most} as long.",
        *([""] if found else []),
        *jumps,
    ]


def _kind(one: AsCalled) -> tuple[str, str, str]:
    return one.api, one.accuracy, one.dtype


# ------------------------------------------------------------------------------------ the steps


def _homes(run: Run, stale: Keys) -> list[str]:
    """A table per branch and home shape, a line per step, scheme, format and dtype."""
    rows = [row for row in run.rows if row.home]
    if not rows:
        return []
    text = [
        "Times in us: the kernel alone with its 20 % and 80 % quantiles, the pass that prepares A, "
        "the total of both. x cuBLAS compares the total; x parent and x step 1 compare kernels.",
    ]
    for branch in (*BRANCHES, *sorted({row.branch for row in rows} - set(BRANCHES))):
        own = [row for row in rows if row.branch == branch]
        for shape in in_order(row.shape for row in own):
            title = BRANCHES[branch].title if branch in BRANCHES else branch
            here = [row for row in own if row.shape == shape]
            text += ["", f"#### {title}, {dims(shape)}", "", *_wide(here, stale)]
    return text


WIDE: Final = (
    ("step", "r"),
    ("scheme", "l"),
    ("format", "l"),
    ("A, C", "l"),
    ("kernel", "r"),
    ("20-80 %", "r"),
    ("pass", "r"),
    ("total", "r"),
    ("x cuBLAS", "r"),
    ("TFLOPS", "r"),
    ("GB/s", "r"),
    ("of its limit", "r"),
    ("x parent", "r"),
    ("x step 1", "r"),
    ("NMSE, product", "r"),
    ("NMSE, kernel", "r"),
    ("registers", "r"),
    ("spills", "r"),
    ("shared memory", "r"),
)


def _wide(rows: Sequence[Row], stale: Keys) -> list[str]:
    known = formats(rows)
    ordered = sorted(
        rows, key=lambda r: (r.step, r.scheme[-3:], r.output, known.index(r.format), r.input)
    )
    lines = [
        [
            f"{row.step}{_mark(row, stale)}",
            row.scheme,
            row.format.upper(),
            dtypes(row),
            cell(row.kernel_us) if row.status == "ok" else row.status,
            ABSENT
            if row.p20_us is None or row.p80_us is None
            else f"{number(row.p20_us)}-{number(row.p80_us)}",
            cell(row.activation_us),
            cell(row.total_us),
            ratio(row.x_cublas),
            cell(row.tflops),
            cell(row.gbps),
            percent(row.limit_share),
            ratio(row.x_parent),
            ratio(row.x_step1),
            error(row.nmse_float),
            error(row.nmse_same_operands),
            whole(row.registers),
            whole(row.spill_bytes),
            whole(row.smem_bytes),
        ]
        for row in ordered
    ]
    return grid([head for head, _ in WIDE], "".join(side for _, side in WIDE), lines)


def whole(value: int | None) -> str:
    return ABSENT if value is None else str(value)


def dtypes(row: Row) -> str:
    """ "float16", or "float32, float16" where A and C differ."""
    return row.input if row.input == row.output else f"{row.input}, {row.output}"


def _everywhere(run: Run, stale: Keys) -> list[str]:
    """A table per step and dtypes: kernel and total of every format at every shape."""
    rows = timed(run.rows)
    text: list[str] = []
    for step in tops(run):
        own = [row for row in rows if row.step == step]
        if all(row.home for row in own):
            continue
        for kind in sorted({dtypes(row) for row in own}, reverse=True):
            here = [row for row in own if dtypes(row) == kind]
            text += ["", f"#### Step {step}, {kind}", "", *_shapes(here, stale)]
    if not text:
        return []
    return ["Microseconds, kernel / total, then how many times as fast as cuBLAS.", *text]


def _shapes(rows: Sequence[Row], stale: Keys) -> list[str]:
    names = formats(rows)
    at: dict[tuple[Size, str], Row] = {(row.shape, row.format): row for row in rows}

    def text(row: Row | None) -> str:
        if row is None:
            return ABSENT
        times = f"{cell(row.kernel_us)} / {cell(row.total_us)}, {ratio(row.x_cublas)}"
        return times + _mark(row, stale)

    lines = [
        [*map(str, shape), *(text(at.get((shape, name))) for name in names)]
        for shape in in_order(row.shape for row in rows)
    ]
    head = ["M", "N", "K", *(name.upper() for name in names)]
    return grid(head, "r" * len(head), lines)


# -------------------------------------------------------------------------- baselines and machine


def _baselines(run: Run) -> list[str]:
    if not run.peers:
        return []
    names = formats(row for row in run.rows)
    names = [
        name for name in names if any(p.peer == LLAMA_CPP and p.format == name for p in run.peers)
    ]
    layers = [name for name in LAYERS if any(p.peer == name for p in run.peers)]
    lines = []
    for size in in_order(peer.shape for peer in run.peers):
        theirs = baseline(run, CUBLAS, "f16", size)
        lines.append(
            [
                *map(str, size),
                cell(theirs.us if theirs else None),
                cell(theirs.tflops if theirs else None),
                *(cell(baseline_us(run, LLAMA_CPP, name, size)) for name in names),
                *(cell(baseline_us(run, name, "", size)) for name in layers),
            ]
        )
    head = ["M", "N", "K", BASELINES[CUBLAS], "TFLOPS"]
    head += [f"{BASELINES[LLAMA_CPP]} {name.upper()}" for name in names]
    head += [LAYERS[name] for name in layers]
    labels = BASELINES | LAYERS
    sources = dict.fromkeys(
        f"- {labels.get(peer.peer, peer.peer)}: {peer.source}"
        + ("" if peer.same_run else ". From another run on the same GPU model")
        for peer in run.peers
    )
    return [
        "Microseconds. cuBLAS: the kernel alone, both operands already float16. llama.cpp: from "
        "float32 A to float32 C. Humming: a layer called, from float16 A to float16 C.",
        "",
        *grid(head, "r" * len(head), lines),
        "",
        *sources,
    ]


def limits(env: Environment) -> list[tuple[str, str]]:
    """What the GPU did at most, one fact a line."""
    rates = (("copy", env.limits.copy_tbps), ("read", env.limits.read_tbps))
    found = [(what, f"{number(rate)} TB/s") for what, rate in rates if rate]
    tops = sorted(env.limits.tops.items(), key=lambda item: item[1])
    return found + [
        (UNITS.get(unit, unit), f"{number(rate)} T operations/s") for unit, rate in tops
    ]


def facts(env: Environment) -> list[tuple[str, str]]:
    """The machine of a run and its software, one line each; what is not known is left out."""
    clocks = env.clocks_mhz
    given: list[tuple[str, Any]] = [
        ("GPU", env.where),
        ("Compute capability", env.cc and "{}.{}".format(*env.cc)),
        ("SMs", env.sms),
        ("L2 cache", env.l2_bytes and f"{env.l2_bytes / 2**20:.0f} MiB"),
        ("Memory", env.memory_bytes and f"{env.memory_bytes / 2**30:.0f} GiB"),
        ("SM clock before", clocks.before and f"{clocks.before:.0f} MHz"),
        ("SM clock after", clocks.after and f"{clocks.after:.0f} MHz"),
        ("SM clock at most", clocks.max and f"{clocks.max:.0f} MHz"),
        ("Power after the run", env.power_draw_w and f"{env.power_draw_w:.0f} W"),
        ("Reasons for lower clocks", env.throttle),
        ("Driver", env.driver),
        ("CUDA toolkit", env.cuda),
        ("numba-cuda", env.numba_cuda),
        ("Numba", env.numba),
        ("NumPy", env.numpy),
        ("Python", env.python),
        ("Commit", env.git.sha and env.git.sha + (" and changes" if env.git.dirty else "")),
        ("Command", env.command),
        ("Date", env.utc),
    ]
    return [(what, str(value)) for what, value in given if value is not None]


def _pairs(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [f"- {what}: {value}" for what, value in pairs]


def _limits(env: Environment) -> list[str]:
    return _pairs(limits(env))


def _environment(env: Environment) -> list[str]:
    return _pairs(facts(env))


def _exceptions(run: Run, stale: Keys) -> list[str]:
    """What the tables above have no figure for, and what is no fact about this tree."""
    said: dict[str, int] = {}
    for row in run.rows:
        if row.status != "ok":
            text = f"step {row.step}, {row.status}: {row.why}"
            said[text] = said.get(text, 0) + 1
    lines = [
        f"- {text}" + (f" ({count} rows)" if count > 1 else "") for text, count in said.items()
    ]
    old: dict[str, int] = {}
    records: list[Row | AsCalled] = [*sorted(run.rows, key=lambda row: row.step), *run.as_called]
    for one in records:
        if one.key in stale:
            what = f"step {one.step}" if isinstance(one, Row) else f"{one.api} with step {one.step}"
            old[what] = old.get(what, 0) + 1
    lines += [
        f"- {what}, stale: {count} rows are older than its code; `make bench` measures them again"
        for what, count in old.items()
    ]
    return lines or ["None."]
