"""What is checked on each of several ranks: see `test_shard.py`, which starts them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from qformats import FORMATS, dequantize, quantize
from steps.nn import all_reduce
from steps.nn import operator as operator
from steps.nn.all_reduce import all_reduce_of
from steps.nn.experts import QuantExperts
from steps.nn.fsdp import shard_blocks
from steps.nn.linear import QuantLinear, keep_out_of_ddp, quantize_model
from steps.nn.rows import QuantEmbedding
from tests.nn.ranks import each_case

K = 288  # nine blocks of 32, which two ranks do not divide
PARTS = (96, 24, 40)
N = sum(PARTS)
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def blocks_of(name: str = "q4_0", n: int = N, k: int = K, seed: int = 1) -> np.ndarray:
    w = np.random.default_rng(seed).standard_normal((n, k), dtype=np.float32)
    return quantize(w, name)


def tensor(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    made = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(made).to(dtype)


def rank() -> int:
    return distributed.get_rank()


def ranks() -> int:
    return distributed.get_world_size()


def share(size: int, unit: int = 1, start: int = 0) -> range:
    """What this rank has of `size` columns or rows, counted here once more."""
    units = [start + i for i in range(size)][::unit]
    counts = [len(units) * (r + 1) // ranks() - len(units) * r // ranks() for r in range(ranks())]
    first = sum(counts[: rank()])
    a = units[first]
    return range(a, a + counts[rank()] * unit)


def own_rows(parts: tuple[int, ...] = PARTS) -> list[int]:
    starts = [sum(parts[:i]) for i in range(len(parts))]
    each = zip(starts, parts, strict=True)
    return [row for start, size in each for row in share(size, start=start)]


def exact(x: Any, blocks: np.ndarray, bias: Any = None) -> tuple[Any, Any]:
    """The float64 product of the dequantized weights, and the sum of the sizes of its terms."""
    w = torch.from_numpy(dequantize(blocks)).double()
    y, size = x.double() @ w.T, x.double().abs() @ w.abs().T
    return (y if bias is None else y + bias.double()), size


def within(y: Any, right: Any, size: Any, roundings: float = 1.0) -> bool:
    """Whether y is the float64 product, summed in float32, then rounded to its dtype; `roundings`:
    of numbers as large as all terms, in place of one of the result."""
    allowed = (K + 8) * 2.0**-24 * size + 2.0**-25
    rounded = ROUNDING[y.dtype]
    allowed = allowed + rounded * (right.abs() + allowed + (roundings - 1) * size)
    return bool(((y.double() - right).abs() <= allowed).all())


def case_a_column_layer_has_a_share_of_each_part() -> None:
    for dtype in ROUNDING:
        x, blocks, bias = tensor(3, K, dtype=dtype), blocks_of(), tensor(N, seed=2)
        layer = QuantLinear.from_blocks(blocks, bias)
        assert layer.shard(None, "column", parts=PARTS) is layer
        y, (right, size) = layer(x), exact(x, blocks, bias)
        rows = own_rows()
        assert y.dtype == dtype
        assert y.shape == (3, len(rows)) == (3, layer.out_features)
        assert within(y, right[:, rows], size[:, rows])
        torch.testing.assert_close(
            layer.weight, torch.from_numpy(dequantize(blocks)[rows]), rtol=0, atol=0
        )
        assert f"column {rank()} of {ranks()}" in repr(layer)


def case_a_gathered_column_layer_is_whole() -> None:
    x, blocks, bias = tensor(2, 3, K), blocks_of(), tensor(N, seed=2)
    layer = QuantLinear.from_blocks(blocks, bias).shard(None, "column", parts=PARTS, gather=True)
    assert within(layer(x), *exact(x, blocks, bias))
    one = QuantLinear.from_blocks(blocks, bias).shard(None, "column", gather=True)
    assert one(x).shape == (2, 3, N)
    assert within(one(x), *exact(x, blocks, bias))
    everywhere: list[Any] = [None] * ranks()
    distributed.all_gather_object(everywhere, one(x))
    assert all(torch.equal(one, everywhere[0]) for one in everywhere)


def case_a_row_layer_adds_up_in_float32_and_rounds_once() -> None:
    for dtype in ROUNDING:
        x, blocks, bias = tensor(5, K, dtype=dtype), blocks_of(), tensor(N, seed=2)
        mine = share(K, 32)
        for b in (None, bias):
            layer = QuantLinear.from_blocks(blocks, b).shard(None, "row")
            y = layer(x[:, mine.start : mine.stop])
            assert y.dtype == dtype
            assert within(y, *exact(x, blocks, b)), dtype
            assert layer(x[:0, mine.start : mine.stop]).shape == (0, N)


def case_large_sums_are_of_rounded_products() -> None:
    x, blocks = tensor(5, K, dtype=torch.float16), blocks_of()
    mine = share(K, 32)
    layer = QuantLinear.from_blocks(blocks).shard(None, "row")
    before, all_reduce.ONE_SHOT = all_reduce.ONE_SHOT, 5 * N * 4 - 1
    try:
        y = layer(x[:, mine.start : mine.stop])
    finally:
        all_reduce.ONE_SHOT = before
    assert within(y, *exact(x, blocks), 1 + ranks())
    assert not within(y, *exact(x, blocks)), "each product is rounded, then the sums are"
    assert layer(x[:, mine.start : mine.stop]).dtype == torch.float16


def case_a_pair_needs_no_word_between() -> None:
    """Gate and up packed, split where the blocks of down are: nine, so unevenly."""
    hidden, x = K, tensor(4, 64)
    packed, down = blocks_of("q5_1", 2 * hidden, 64), blocks_of("q4_1", 64, hidden, seed=3)

    def mlp(first: Any, second: Any) -> Any:
        gate, up = first(x).chunk(2, -1)
        return second(nn.functional.silu(gate) * up)

    right = mlp(QuantLinear.from_blocks(packed), QuantLinear.from_blocks(down))
    said: list[str] = []
    plain = distributed.all_reduce

    def counted(*arguments: Any, **options: Any) -> Any:
        said.append("sum")
        return plain(*arguments, **options)

    distributed.all_reduce = counted
    try:
        y = mlp(
            QuantLinear.from_blocks(packed).shard(None, "column", parts=(hidden, hidden), unit=32),
            QuantLinear.from_blocks(down).shard(None, "row"),
        )
    finally:
        distributed.all_reduce = plain
    torch.testing.assert_close(y, right, rtol=1e-4, atol=1e-3)
    assert said == ["sum"]


def case_state_dicts_are_whole() -> None:
    for name, k in (("q4_0", K), ("q6_k", 1024)):
        fmt, rng = FORMATS[name], np.random.default_rng(4)
        raw = rng.integers(0, 256, (N, k // fmt.elements * fmt.block_bytes), np.uint8)
        blocks = raw.view(fmt.dtype)
        blocks["d"] = rng.uniform(0.1, 1, blocks.shape)
        bias = tensor(N, seed=2)
        whole = QuantLinear.from_blocks(blocks, bias).state_dict(prefix="a.")
        splits: list[tuple[str, dict[str, Any]]] = [
            ("column", {"parts": PARTS}),
            ("column", {"gather": True}),
            ("row", {}),
        ]
        for kind, options in splits:
            layer = QuantLinear.from_blocks(blocks, bias).shard(None, kind, **options)
            here = layer.state_dict(prefix="a.")
            assert list(here) == list(whole)
            assert all(torch.equal(here[one], whole[one]) for one in whole)
            empty = QuantLinear(k, N, format=name).shard(None, kind, **options)
            assert not empty.weight.any()
            empty.load_state_dict(layer.state_dict())
            torch.testing.assert_close(empty.weight, layer.weight, rtol=0, atol=0)
            torch.testing.assert_close(empty.bias, layer.bias, rtol=0, atol=0)
            rows = own_rows(options.get("parts", (N,))) if kind == "column" else list(range(N))
            columns = share(k, fmt.elements) if kind == "row" else range(k)
            right = dequantize(blocks)[rows][:, columns.start : columns.stop]
            assert torch.equal(empty.weight, torch.from_numpy(right))
            share_of = {**layer.state_dict(), "blocks": layer.blocks, "bias": layer.bias}
            with pytest.raises(RuntimeError, match=r"blocks has shape .* the whole layer has"):
                empty.load_state_dict(share_of)


def case_bad_scales_are_refused_by_the_rank_that_has_them() -> None:
    blocks = blocks_of()
    layer = QuantLinear.from_blocks(blocks).shard(None, "column")
    given = QuantLinear.from_blocks(blocks.copy()).state_dict()
    given["blocks"][0, :2] = 255  # the first row's first scale is a NaN
    if rank() == 0:
        with pytest.raises(RuntimeError, match="blocks: "):
            layer.load_state_dict(given)
    else:
        layer.load_state_dict(given)


def case_gradients_are_those_of_one_process() -> None:
    blocks, other = blocks_of(), blocks_of(n=64, k=N, seed=5)
    bias = nn.Parameter(tensor(N, seed=2))
    end = nn.Parameter(tensor(64, seed=3))

    def gradients(first: Any, second: Any) -> list[Any]:
        x = tensor(3, K).requires_grad_()
        y = second(first(x).sin()).square().sum()
        y.backward()
        return [x.grad, first.bias.grad, second.bias.grad]

    right = gradients(QuantLinear.from_blocks(blocks, bias), QuantLinear.from_blocks(other, end))
    here = gradients(
        QuantLinear.from_blocks(blocks, nn.Parameter(bias.detach())).shard(None, "column", unit=32),
        QuantLinear.from_blocks(other, nn.Parameter(end.detach())).shard(None, "row"),
    )
    rows = share(N, 32)
    right[1] = right[1][rows.start : rows.stop]
    for a, b in zip(here, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3 * float(b.abs().max()))
    x = tensor(3, K).requires_grad_()
    layer = QuantLinear.from_blocks(blocks).shard(None, "column", parts=PARTS, gather=True)
    layer(x).sin().sum().backward()
    z = tensor(3, K).requires_grad_()
    QuantLinear.from_blocks(blocks)(z).sin().sum().backward()
    torch.testing.assert_close(x.grad, z.grad, rtol=1e-4, atol=1e-3)


def case_torch_compile_sees_it_whole() -> None:
    x, blocks = tensor(5, K), blocks_of()
    first = QuantLinear.from_blocks(blocks).shard(None, "column", unit=32)
    second = QuantLinear.from_blocks(blocks_of(n=64, k=N, seed=5)).shard(None, "row")
    with torch.no_grad():
        right = second(first(x))
        made = torch.compile(lambda v: second(first(v)), backend="aot_eager")
        torch.testing.assert_close(made(x), right)


def case_meshes_and_groups_are_taken() -> None:
    x, blocks = tensor(2, K), blocks_of()
    mesh = init_device_mesh("cpu", (ranks(),))
    group = distributed.new_group(list(range(ranks())))
    for one in (mesh, group):
        layer = QuantLinear.from_blocks(blocks).shard(one, "column", gather=True)
        assert within(layer(x), *exact(x, blocks))
    assert all_reduce_of(group, x.device) is all_reduce_of(group, x.device)
    assert all_reduce_of(group, x.device).group is group
    assert all_reduce_of(group, x.device).how == "gloo"
    wide = init_device_mesh("cpu", (1, ranks()), mesh_dim_names=("data", "tensor"))
    with pytest.raises(ValueError, match=r"2 dimensions \(data, tensor\): give one of them"):
        QuantLinear.from_blocks(blocks).shard(wide, "column")
    layer = QuantLinear.from_blocks(blocks).shard(wide["tensor"], "column", gather=True)
    assert within(layer(x), *exact(x, blocks))


def case_what_ranks_cannot_share() -> None:
    def made(name: str = "q4_0", n: int = N, k: int = K) -> Any:
        return QuantLinear(k, n, format=name)

    count = ranks()
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: made(k=32).shard(None, "row"), f"1 units of 32, too few for {count} ranks"),
        (lambda: made("q6_k", k=256).shard(None, "row"), "1 units of 256, too few"),
        (lambda: made(n=1).shard(None, "column"), "1 rows are 1 units of 1, too few"),
        (lambda: made().shard(None, "column", parts=(N, 1)), f"must add up to the {N} rows"),
        (lambda: made().shard(None, "column", parts=(N, 0)), "must add up to"),
        (lambda: made().shard(None, "column", unit=64), f"{N} rows are no multiple of unit=64"),
        (lambda: made().shard(None, "row", unit=48), "unit=48 cuts blocks of q4_0: use a multiple"),
        (lambda: made().shard(None, "row", unit=0), "0"),
        (lambda: made().shard(None, "rows"), "by column or row, not by 'rows'"),
        (lambda: made().shard(None, "row", parts=PARTS), "takes neither parts nor gather"),
        (lambda: made().shard(None, "row", gather=True), "takes neither parts nor gather"),
        (lambda: made().shard(None, "row").shard(None, "row"), "split already: row"),
        (lambda: made().shard(None, "row")(tensor(2, K)), r"must have shape \[\.\.\., .*got \[2, "),
    ]
    for attempt, said in refused:
        with pytest.raises(ValueError, match=said):
            attempt()


def case_copies_share_the_group_and_pickles_are_refused() -> None:
    x, blocks = tensor(2, K), blocks_of()
    layer = copy.deepcopy(QuantLinear.from_blocks(blocks).shard(None, "column", gather=True))
    assert within(layer(x), *exact(x, blocks))
    with pytest.raises(TypeError, match="cannot be pickled: save its state_dict"):
        pickle.dumps(layer)


def experts_layer(dtype: Any = torch.float32) -> QuantExperts:
    """Five experts of 96 gates: three units of 32, which two ranks do not divide."""
    e, k, inner = 5, 64, 96
    parts = []
    for i, (name, n, width) in enumerate(
        (("q4_0", inner, k), ("q5_0", inner, k), ("q8_0", k, inner))
    ):
        held = blocks_of(name, e * n, width, seed=i)
        made = torch.from_numpy(held.view(np.uint8).reshape(e, n, -1).copy())
        parts.append((made, name))
    gates, ups, downs = (tensor(e, n, seed=n) for n in (inner, inner, k))
    return QuantExperts(*parts, "clamped", (gates, ups, downs)).to(dtype)


def case_experts_have_the_answers_of_one_process() -> None:
    """By whole experts and by rows; of ids that are none NaN, on every rank; of no tokens none."""
    ids = torch.tensor([[0, 4], [3, 1], [2, 2], [1, 0], [-1, 3]])
    shares = torch.rand(5, 2, generator=torch.Generator().manual_seed(0))
    for dtype in ROUNDING:
        x, one = tensor(5, 64, dtype=dtype), experts_layer(dtype)
        wanted = one(x, ids, shares)
        size = wanted.nan_to_num().abs().max().double()
        for kind in ("experts", "rows"):
            layer = experts_layer(dtype)
            assert layer.shard(None, kind) is layer
            y = layer(x, ids, shares)
            assert (y.dtype, y.shape) == (dtype, (5, 64))
            assert torch.equal(y.isnan(), wanted.isnan())
            assert y[4].isnan().all()
            off = (y.double() - wanted.double()).nan_to_num().abs().max()
            assert off <= (64 * 2.0**-24 + 4 * ROUNDING[dtype]) * size, (kind, dtype, off)
            assert layer(x[:0], ids[:0], shares[:0]).shape == (0, 64)
            assert f"{kind} {rank()} of {ranks()}" in repr(layer)
            assert torch.equal(copy.deepcopy(layer)(x, ids, shares)[:4], y[:4])
    share_of = experts_layer().shard(None, "rows")
    assert share_of.inner == share_of.up_blocks.shape[1] == len(share(96, 32))
    share_of = experts_layer().shard(None, "experts")
    assert share_of.num_experts == len(share_of.down_bias) == len(share(5))


def case_experts_have_whole_state_dicts() -> None:
    state = experts_layer().state_dict()
    for kind in ("experts", "rows"):
        layer = experts_layer().shard(None, kind)
        found = layer.state_dict()
        assert found.keys() == state.keys()
        assert all(torch.equal(found[key], one) for key, one in state.items())
        changed = {key: one.clone() for key, one in state.items()}
        changed["up_blocks"] = changed["up_blocks"].flip(0)
        changed["down_bias"] = changed["down_bias"] + 1
        layer.load_state_dict(changed)
        found = layer.state_dict()
        assert all(torch.equal(found[key], one) for key, one in changed.items())
        small = {**changed, "gate_blocks": changed["gate_blocks"][:2]}
        with pytest.raises(RuntimeError, match=r"gate_blocks has shape .* 96 rows of 5 experts"):
            layer.load_state_dict(small)


def case_experts_in_a_graph_of_torch() -> None:
    ids = torch.tensor([[0, 4], [3, 1], [2, 2]])
    x, shares = tensor(3, 64), torch.rand(3, 2, generator=torch.Generator().manual_seed(0))
    for kind in ("experts", "rows"):
        layer = experts_layer().shard(None, kind)
        whole = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(whole(x, ids, shares), layer(x, ids, shares))


def case_experts_that_ranks_cannot_share() -> None:
    layer = experts_layer()
    with pytest.raises(ValueError, match="split by experts or rows, not by 'column'"):
        layer.shard(None, "column")
    with pytest.raises(ValueError, match="unit=48 cuts blocks of q8_0: use a multiple of 32"):
        layer.shard(None, "rows", unit=48)
    with pytest.raises(ValueError, match=r"96 rows are 1 units of 96, too few for"):
        layer.shard(None, "rows", unit=96)
    one = experts_layer()
    parts = [(one._buffers[f"{name}_blocks"][:1], one.formats[name]) for name in one.formats]
    with pytest.raises(ValueError, match=r"1 experts are too few for \d ranks: split their rows"):
        QuantExperts(*parts).shard(None, "experts")
    layer.shard(None, "rows")
    with pytest.raises(ValueError, match=r"the layer is split already: rows \d of \d"):
        layer.shard(None, "rows")
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(layer)


def of_transformers() -> tuple[Any, Any]:
    """Logits of a small model of another library: of one process, and of this rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 288, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 99}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    quantize_model(model, "q4_0", skip=())
    ids = torch.arange(12)[None]
    with torch.no_grad():
        alone = model(ids).logits
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, name).shard(None, "column", unit=16)
            layer.self_attn.o_proj.shard(None, "row")
            for name in ("gate_proj", "up_proj"):
                getattr(layer.mlp, name).shard(None, "column", unit=32)
            layer.mlp.down_proj.shard(None, "row")
        model.lm_head.shard(None, "column", gather=True)
        return alone, model(ids).logits


def case_ddp_leaves_blocks_alone() -> None:
    """Statistics of a norm are sent from rank 0, gradients are the mean of all ranks', blocks are
    neither compared nor sent, of a model in a wrapper too."""
    ddp = nn.parallel.DistributedDataParallel
    for wrapped in (False, True):
        torch.manual_seed(rank())  # all ranks have other numbers
        model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))
        quantize_model(model, "q8_0")
        for one in (model[0], model[2]):
            one.bias.requires_grad_()
        model[1].running_mean.add_(rank())
        if wrapped:
            model = nn.Sequential(model)
            keep_out_of_ddp(model)
        inner = model[0] if wrapped else model
        before = [inner[i].blocks.clone() for i in (0, 2)]
        shared = ddp(copy.deepcopy(model))
        names = {"running_mean", "running_var", "num_batches_tracked"}
        assert {name.rpartition(".")[2] for name in shared.named_module_buffers} == names
        inner = shared.module[0] if wrapped else shared.module
        mean = inner[1].running_mean.clone()
        shared(torch.randn(4, 64)).sum().backward()
        assert all(torch.equal(inner[i].blocks, one) for i, one in zip((0, 2), before, strict=True))
        for own in (inner[2].bias.grad, inner[0].bias.grad, inner[0].bias, mean):
            all_of = [torch.empty_like(own) for _ in range(ranks())]
            distributed.all_gather(all_of, own.detach())
            assert all(torch.equal(one, own) for one in all_of)


# --- FSDP2 ----------------------------------------------------------------------------------------


def small(seed: int = 0, **options: Any) -> Any:
    """Two layers of other sizes than ranks divide, an adapter and a norm; biases are trained."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 37), nn.Linear(37, 96, bias=False), nn.LayerNorm(96), nn.Linear(96, 5)
    )
    quantize_model(model, "q8_0", skip=("1",), **options)
    for one in (model[0], model[3]):
        one.bias.requires_grad_()
    return model


def fsdp(model: Any, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (ranks(),))
    for one in (*model, model):
        fully_shard(shard_blocks(one), mesh=mesh, **options)
    return model


def case_fsdp_gives_each_rank_a_share_of_the_blocks() -> None:
    """Values and gradients are those of one process; outside a forward a rank has its rows."""
    alone, shared = small(), fsdp(small())
    x = [tensor(4, 64, seed=one) for one in range(ranks())]
    with torch.no_grad():
        torch.testing.assert_close(shared(x[rank()]), alone(x[rank()]))
    own = x[rank()].clone().requires_grad_()
    shared(own).square().sum().backward()
    every = [one.clone().requires_grad_() for one in x]
    (sum(alone(one).square().sum() for one in every) / ranks()).backward()
    torch.testing.assert_close(own.grad, every[rank()].grad * ranks())
    for name, one in alone.named_parameters():
        grad = shared.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(grad, one.grad, rtol=1e-4, atol=1e-4)
    held = 0
    for i, one in ((0, alone[0]), (3, alone[3])):
        blocks = shared[i].blocks
        assert tuple(blocks.shape) == tuple(one.blocks.shape)
        assert not blocks.requires_grad
        here = blocks.to_local()
        size = -(-len(one.blocks) // ranks())
        assert torch.equal(here, one.blocks[rank() * size :][:size])
        held += len(here)
    assert held < 37 + 5
    with pytest.raises(RuntimeError, match="ranks share the blocks of this layer"):
        shared[0].dequantize()
    shared[0].unshard()
    assert torch.equal(shared[0].weight.detach(), alone[0].weight.detach())
    shared[0].reshard()
    assert shared[0].weight.shape == (37, 64)


def case_fsdp_in_16_bits_leaves_blocks_alone() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    alone, shared = small().bfloat16(), fsdp(small(), mp_policy=policy)
    x = tensor(4, 64)
    with torch.no_grad():
        y, right = shared(x), alone(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, right)


def case_fsdp_state_dicts_load_back() -> None:
    """Whole and shared ones, into shared models and into one process."""
    alone, shared = small(), fsdp(small())
    right = alone.state_dict()
    for whole in (True, False):
        options = StateDictOptions(full_state_dict=whole, cpu_offload=whole)
        state = get_model_state_dict(shared, options=options)
        assert sorted(state) == (sorted(right) if not whole or rank() == 0 else [])
        other = fsdp(small(seed=1))
        if whole:
            if rank() == 0:  # the others get their shares when they load
                assert all(torch.equal(state[name], one) for name, one in right.items())
                assert small(seed=1).load_state_dict(state).missing_keys == []
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(other, state, options=options)
        for name, one in other.state_dict().items():
            found = one.full_tensor() if hasattr(one, "full_tensor") else one
            assert torch.equal(found, right[name]), name
    state = shared.state_dict()
    state["0._extra_state"] = QuantLinear(64, 37, format="q5_0").get_extra_state()
    with pytest.raises(RuntimeError, match="the state holds q5_0, version 1, and the layer takes"):
        fsdp(small()).load_state_dict(state)


def packed_on_the_host(layer: Any) -> Any:
    """A layer with what a GPU would have, in host memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "upload", lambda array, device: torch.from_numpy(array.copy()))
        patch.setattr(operator, "capability", lambda device: (9, 0))
        patch.setattr(operator, "reserve_counters", lambda device: None)
        layer._move(torch.device("cuda"))
    return layer


def case_fsdp_shards_what_kernels_read() -> None:
    """Packed weights are gathered bit for bit, each rank keeps its rows of the blocks, and both
    come back from state dicts."""
    options: Any
    for options in ({}, {"accuracy": "fast"}):
        models = [small(seed, **options) for seed in range(2)]
        for model in models:
            packed_on_the_host(model[0])
            packed_on_the_host(model[3])
        kept, names = {i: copy.deepcopy(models[0][i]) for i in (0, 3)}, set(models[0].state_dict())
        first, second = (fsdp(model) for model in models)

        def check(shared: Any, kept: Any = kept) -> None:
            for i, right in kept.items():
                layer = shared[i]
                held = sum(one.to_local().nbytes for one in layer._shares().values())
                assert held <= layer.device_bytes / ranks() + 8
                layer.unshard()
                assert list(layer.packed) == list(right.packed)
                for name, arrays in layer.packed.items():
                    for a, b in zip(arrays, right.packed[name], strict=True):
                        assert (a.dtype, a.shape) == (b.dtype, b.shape)
                        assert torch.equal(a, b)
                layer.reshard()
                size = -(-len(right.blocks) // ranks())
                assert torch.equal(layer.rows, right.blocks[rank() * size :][:size])

        check(first)
        state = first.state_dict()
        assert set(state) == names
        assert torch.equal(state["0.blocks"].full_tensor(), kept[0].blocks)
        cut = {"0.blocks": state["0.blocks"].full_tensor()[1:]}
        lacks = {name: one for name, one in state.items() if name != "0.blocks"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(operator, "capability", lambda device: (9, 0))
            with pytest.raises(RuntimeError, match=r"0\.blocks has shape \[36, .* has \[37, "):
                second.load_state_dict(state | cut)
            with pytest.raises(RuntimeError, match=r"Missing key.*0\.blocks"):
                second.load_state_dict(lacks)
            second.load_state_dict(state)
            check(second)
            third = small(2, **options)
            for i in (0, 3):
                packed_on_the_host(third[i])
            whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_model_state_dict(first, options=whole)
            assert set(state) == (names if rank() == 0 else set())
            whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(fsdp(third), state, options=whole)
            check(third)
        with pytest.raises(RuntimeError, match="ranks share the blocks of this layer"):
            second[0]._arrays("weights")
        with pytest.raises(ValueError, match="cannot move to cuda: move it before shard_blocks"):
            second[0]._move(torch.device("cuda"))


def case_fsdp_shards_embeddings() -> None:
    blocks = torch.from_numpy(blocks_of(n=10, k=64).view(np.uint8).reshape(10, -1))
    table = QuantEmbedding(blocks, "q4_0", torch.float32)
    right, ids = table(torch.arange(10)), torch.arange(10)
    model = fsdp(nn.Sequential(table))
    assert torch.equal(model(ids), right)
    assert len(table.blocks.to_local()) < 10
    assert torch.equal(model.state_dict()["0.blocks"].full_tensor(), blocks)


def case_fsdp_refuses_what_it_cannot_share() -> None:
    layer = QuantLinear.from_blocks(blocks_of())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", "2.11.0+cu130")
        with pytest.raises(RuntimeError, match=r"torch 2\.11.* floats alone.*: take torch 2\.13"):
            shard_blocks(nn.Sequential(layer))
    with pytest.raises(ValueError, match=r"^0 is split already: column"):
        shard_blocks(nn.Sequential(copy.deepcopy(layer).shard(None, "column")))
    with pytest.raises(ValueError, match=r"^0 is on the meta device, without blocks: load"):
        shard_blocks(nn.Sequential(copy.deepcopy(layer).to("meta")))
    part = torch.zeros(2, 32, 18, dtype=torch.uint8), "q4_0"
    with pytest.raises(ValueError, match=r"^0 holds experts, whose blocks fully_shard cannot"):
        shard_blocks(nn.Sequential(QuantExperts(part, part, part)))
    shared = shard_blocks(nn.Sequential(layer))
    assert shard_blocks(shared) is shared
    with pytest.raises(ValueError, match="split it by shard\\(\\) before shard_blocks"):
        layer.shard(None, "column")


CASES = [one for name, one in globals().items() if name.startswith("case_")]


def run() -> dict[str, str]:
    return each_case(CASES)


def on_gpus() -> str:
    """Layers on a GPU each, small sums and large ones, and in a CUDA graph; how sums are made."""
    from numba import cuda

    torch.cuda.set_device(rank())
    cuda.select_device(rank())
    device, blocks = torch.device("cuda", rank()), blocks_of()
    layer = QuantLinear.from_blocks(blocks, tensor(N, seed=2)).shard(None, "row").to(device)
    joined = QuantLinear.from_blocks(blocks).shard(None, "column", gather=True).to(device)
    mine, sums = share(K, 32), all_reduce_of(distributed.group.WORLD, device)
    with torch.no_grad():
        for tokens in (1, 5, 2000):
            x = tensor(tokens, K, dtype=torch.float16)
            right, size = exact(x, blocks, tensor(N, seed=2))
            own = x[:, mine.start : mine.stop].contiguous().to(device)
            few = sums.is_small(tokens * N)
            assert few == (tokens < 2000)
            for y in (layer(own), graphed(layer, own)):
                assert y.dtype == torch.float16
                # steps may round x to 8 bits of the largest of 32
                off = (y.cpu().double() - right).abs() <= 0.01 * size + 1e-3
                assert bool(off.all())
            whole = joined(x.to(device)).cpu()
            assert bool(((whole.double() - exact(x, blocks)[0]).abs() <= 0.01 * size + 1e-3).all())
        of_exchange(sums, device)
        of_experts(device)
        state = layer.state_dict()
        assert torch.equal(state["blocks"], QuantLinear.from_blocks(blocks).blocks)
    return sums.how


def of_training() -> dict[str, dict[str, int]]:
    """DDP, FSDP2 and `QuantLinear.shard` over NCCL: values and gradients are those of one GPU, and
    state dicts load back; bytes that each takes, before a step and at its most."""
    from numba import cuda

    torch.cuda.set_device(rank())
    cuda.select_device(rank())
    device, mesh = torch.device("cuda", rank()), init_device_mesh("cuda", (ranks(),))
    size, found = 1024, {}

    def made() -> Any:
        torch.manual_seed(0)
        hidden = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        model = nn.Sequential(*hidden, nn.LayerNorm(size), *copy.deepcopy(hidden))
        quantize_model(model, "q4_0")
        return model.requires_grad_(False)

    def trained(model: Any) -> Any:
        for one in model:
            if getattr(one, "bias", None) is not None:
                one.bias.requires_grad_()
        return model

    def step(name: str, model: Any, x: Any, loss: Callable[[Any], Any]) -> tuple[Any, Any]:
        x = x.clone().requires_grad_()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = model(x)
        loss(y).backward()
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated()
        found[name] = {"before": before - begin, "most": most - begin}
        return y.detach(), x.grad

    x = [tensor(64, size, dtype=torch.float32, seed=one).to(device) for one in range(ranks())]
    mean = lambda y: y.square().mean()  # noqa: E731
    reserved = torch.zeros(1, device=device)
    operator.reserve_counters(device)
    begin = torch.cuda.memory_allocated()
    alone = trained(made().to(device))
    right, of_x = step("alone", alone, x[rank()], mean)
    alone.zero_grad()
    (sum(mean(alone(one)) for one in x) / ranks()).backward()
    trained_ones = [(name, one) for name, one in alone.named_parameters() if one.requires_grad]
    grads = {name: one.grad.clone() for name, one in trained_ones}
    state = {name: one.cpu() for name, one in alone.state_dict().items()}
    del alone

    def close(a: Any, b: Any) -> None:
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))

    def compare(got: tuple[Any, Any], model: Any) -> None:
        close(got[0], right)
        close(got[1], of_x)
        for name, one in model.named_parameters():
            if one.requires_grad:
                own = one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
                close(own, grads[name])

    keep_out_of_ddp(model := trained(made().to(device)))
    shared = nn.parallel.DistributedDataParallel(model, device_ids=[rank()])
    compare(step("ddp", shared, x[rank()], mean), shared.module)
    del shared, model

    def fully_sharded() -> Any:
        model = trained(made())
        for i in range(5):
            fully_shard(shard_blocks(model[i].to(device)), mesh=mesh)
        return fully_shard(shard_blocks(model), mesh=mesh)

    shared = fully_sharded()
    compare(step("fsdp", shared, x[rank()], mean), shared)
    held = sum(one.rows.numel() for one in shared if hasattr(one, "rows"))
    whole = sum(one.numel() for name, one in state.items() if name.endswith("blocks"))
    assert held * ranks() == whole, "host memory"
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    got = get_model_state_dict(shared, options=options)
    assert rank() or all(torch.equal(got[name], one) for name, one in state.items())
    other = fully_sharded()
    with torch.no_grad():
        for one in other[0]._shares().values():
            one.to_local().zero_()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, got, options=options)
    other.load_state_dict(shared.state_dict())
    with torch.no_grad():
        assert torch.equal(other(x[0]), shared(x[0]))
    policy, model = MixedPrecisionPolicy(param_dtype=torch.bfloat16), made().to(device)
    for i in range(2):
        fully_shard(shard_blocks(model[i]), mesh=mesh, mp_policy=policy)
    with torch.no_grad():
        assert model[1](model[0](x[0])).dtype == torch.bfloat16
    del shared, other, model

    model = trained(made())
    for i, kind in enumerate(("column", "row", "", "column", "row")):
        if kind:
            model[i].shard(mesh, kind)
    got = step("shard", model.to(device), x[0], mean)
    y, of_x = step("alone", trained(made().to(device)), x[0], mean)
    close(got[0], y)
    close(got[1], of_x)
    del reserved
    return found


def of_exchange(sums: Any, device: Any) -> None:
    """Large sums, two on their way, again and again with other numbers, and in a CUDA graph."""
    numbers = torch.arange(2000 * 512, device=device).view(2000, 512) % 251
    x = torch.zeros_like(numbers, dtype=torch.float16)

    def many(x: Any) -> Any:
        found = list(x.split(700))
        for _ in range(3):  # nine, so that a graph's first sum has another slot in each replay
            begun: list[Any] = []
            for i, rows in enumerate([*found, None, None]):
                if i > 1:
                    found[i - 2] = sum(begun[i - 2]()) / 3
                if rows is not None:
                    begun.append(sums.begin(rows * (1 + rank())))
        return torch.cat(found)

    for turn in range(20):
        x.copy_(numbers + turn)
        if turn % 2 == rank():
            torch.cuda._sleep(1_000_000)  # the other rank waits, or writes what is still read
        assert torch.equal(many(x), x), turn
    assert torch.equal(graphed(many, x), x)


def of_experts(device: Any) -> None:
    """By whole experts and by rows: answers of one process in float32, of ids that are none NaN."""
    ids = torch.tensor([[0, 4], [3, 1], [2, 2], [1, 0], [-1, 3]])
    shares = torch.rand(5, 2, generator=torch.Generator().manual_seed(0))
    x = tensor(5, 64, dtype=torch.float16)
    wanted = experts_layer()(x.float(), ids, shares)
    size = wanted.nan_to_num().abs().max()
    given = x.to(device), ids.to(device), shares.to(device)
    for kind in ("", "experts", "rows"):
        layer = experts_layer(torch.float16)
        if kind:
            layer.shard(None, kind)
        y = layer.to(device)(*given).cpu()
        assert y.dtype == torch.float16
        assert torch.equal(y.isnan(), wanted.isnan()), kind
        off = (y.float() - wanted).nan_to_num().abs().max()
        assert off <= 0.01 * size, (kind, float(off / size))


def graphed(layer: Any, x: Any) -> Any:
    """What a layer writes when it is replayed from a CUDA graph, twice."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = layer(x)
    graph.replay()
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    found = y.clone()
    graph.reset()
    return found
