"""A decoder whose layers with experts are two launches at one token. They run in the simulator, all
thread blocks of one together."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from math import prod
from typing import Any

import pytest
import torch

from steps.compile.compiler import signature_of
from steps.contract import Launch
from steps.decoder import expert_layers, files, kernel_operations
from steps.decoder.compare import checks
from steps.decoder.expert_layers import ExpertLayers
from steps.decoder.model import Decoder, step_products
from steps.decoder.operations import PLAIN
from steps.driver.machines import Simulator
from steps.kernels.between import chain
from steps.kernels.experts import layer as kernel
from steps.simulator.launch import simulate
from tests.decoder.test_between import changed
from tests.decoder.test_decoder import reference

SIZES = {
    "block_count": 2,
    "embedding_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 128,
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator takes as long as there are threads; and here is no GPU that is asked for."""
    monkeypatch.setattr(chain, "runs_here", lambda: True)
    monkeypatch.setattr(kernel, "shape_of", partial(kernel.shape_of, blocks=2, warps=2))


def loaded(tmp_path: Any, launched: list[Launch], runs: bool = True, **changes: Any) -> Decoder:
    """runs: whether launches run, or are noted alone."""

    def launch(make: Any, arrays: Any, *rest: Any) -> None:
        given = [one.numpy() if one.shape else one.numpy().reshape(1) for one in arrays]
        made = make(*rest, *given, machine=Simulator())
        launched.append(made)
        if runs:
            rest = {"shared_bytes": made.shared_bytes, "resident": prod(made.grid)}
            simulate(made.kernel, made.grid, made.block, made.args, **rest)

    path = tmp_path / "tiny.gguf"
    files.write_tiny(path, architecture="qwen3moe", **SIZES | changes)
    do = changed(PLAIN, expert_layers=ExpertLayers(launch))
    return files.load(path, step_products("cpu"), operations=do)


def test_a_token_is_as_in_float64(kernels: Any, small: None, tmp_path: Any) -> None:
    launched: list[Launch] = []
    model = loaded(tmp_path, launched)
    logits = model.step(torch.tensor([7]), model.cache(1, 4)).double().numpy()
    names = [one.kernel.__name__ for one in launched]
    assert names == ["attention_shown", "layer"] * 2
    trusted = reference(tmp_path / "tiny.gguf")
    right = trusted.step(torch.tensor([7]), trusted.cache(1, 4)).numpy()
    expected = checks.expected(trusted, [7], "exact")
    assert 0.3 * expected < checks.relative(logits, right) < checks.SAFETY * expected


def test_compiled_ahead_is_what_a_token_launches(kernels: Any, small: None, tmp_path: Any) -> None:
    launched: list[Launch] = []
    model = loaded(tmp_path, launched, runs=False, block_count=3)
    kernels.runs = False
    layers, cache = model.layers, model.cache(1, 1)
    given = layers, model.norm, cache, model.config.heads, model.config.epsilon
    ahead = [one.launches()[0] for one in model.operations.expert_layers.ahead(*given)]
    assert not launched
    model.step(torch.tensor([7]), cache)
    kinds = [{(one.kernel, signature_of(one.args)) for one in some} for some in (ahead, launched)]
    assert kinds[0] == kinds[1]
    assert len(kinds[0]) == 3, "attention of the first layer and of the others, and what is behind"


def test_what_is_not_taken(kernels: Any, small: None, tmp_path: Any, monkeypatch: Any) -> None:
    """Prompts, two sequences, biases, a cache in float64, what does not fit, and a GPU whose
    multiprocessors another process may hold."""
    model, cache = loaded(tmp_path, []), torch.zeros((1, 4, 256, 64), dtype=torch.float16)
    takes = partial(expert_layers._takes, model.layers, 4)
    assert takes(cache)
    assert not takes(cache.double())
    assert not model.is_whole(model.cache(1, 4), 2)
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[1].qkv, "bias", torch.zeros(512))
        assert not takes(cache)
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "why_not", lambda shape: "a reason")
        assert not takes(cache)
    with monkeypatch.context() as patch:
        patch.setattr(chain, "runs_here", lambda: False)
        assert not takes(cache)
    model.layers[0].mixture.shared = (None, None, None)
    assert not takes(cache)


@pytest.mark.gpu
def test_right_on_a_gpu(tmp_path: Any) -> None:
    """In a CUDA graph, against torch in float64, with as many thread blocks as row tiles."""
    path = files.write_tiny(tmp_path / "tiny.gguf", architecture="qwen3moe", **SIZES)
    ids, do = checks.prompt(files.WORDS), kernel_operations.chosen("kernels")
    model = files.load(path, step_products(), operations=do)
    assert model.is_whole(model.cache(1, 4), 1)
    found = checks.against_torch(path, ids, accuracy="exact", operations=do)
    assert found["right"], found


HASTY = """
import sys
from steps.kernels.parts import exchange
exchange.PATIENCE = 0  # before a launch takes it for its default
from steps.cli import language_model, main
language_model.LEAST_WAIT = 0
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.gpu
def test_who_waits_in_vain_ends_the_launch_and_is_told_in_a_sentence(tmp_path: Any) -> None:
    """As a chain that gives up. In a process of its own, which loses the GPU with that launch."""
    path = files.write_tiny(tmp_path / "tiny.gguf", architecture="qwen3moe", **SIZES)
    given = [sys.executable, "-c", HASTY, "decoder", str(path), "--ids", "1,5", "--tokens", "2"]
    ended = subprocess.run(given, capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "python -m steps decoder: the GPU ended a launch " in ended.stderr
    assert "Traceback" not in ended.stderr
