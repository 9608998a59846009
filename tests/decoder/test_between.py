"""The decoder with the kernels between its products: the same numbers as with torch's operations.

The kernels run in the simulator here, on the memory of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: it is an extra")

from results.decoder import between, checks, files, operations  # noqa: E402
from results.decoder.model import generate, torch_products  # noqa: E402
from steps.api.machines import Simulator  # noqa: E402
from tests.api.fake_gpu import gpu  # noqa: E402, F401 - a fixture

LLAMA = {"block_count": 2, "embedding_length": 64, "feed_forward_length": 96}


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


class InSimulator:
    """A `between.Template` whose launches run here; `launched` gets the names of their kernels."""

    zeroed = nbytes = 0

    def __init__(self, make: Any, arrays: Any, machine: Simulator, launched: list[str]) -> None:
        self._make, self._machine, self._launched = make, machine, launched

    def __call__(self, arrays: Sequence[Any], zeros: int, workspace: int) -> None:
        given = [one.numpy() if one.shape else one.numpy().reshape(1) for one in arrays]
        launch = self._make(*given, machine=self._machine)
        self._launched.append(launch.kernel.__name__)
        self._machine.run(launch)


def simulated(order: int = 0) -> tuple[Any, list[str]]:
    """(operations by kernels in the simulator, the names of those that ran)."""
    launched: list[str] = []
    template = partial(InSimulator, machine=Simulator(order), launched=launched)
    return between.Kernels(operations.PLAIN, template).operations(), launched


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_decoder_says_the_same_with_kernels(tmp_path: Any, architecture: str) -> None:
    """Greedy tokens and logits; float16 in the cache on either side."""
    path = files.write_tiny(
        tmp_path / "tiny.gguf", "q8_0", architecture=architecture,
        **LLAMA, **{"attention.head_count": 4, "attention.head_count_kv": 2},
    )  # fmt: skip
    do, launched = simulated(1)
    ids = torch.tensor([checks.prompt(files.WORDS, 3), checks.prompt(files.WORDS, 3, 1)])
    found = []
    for one in (operations.PLAIN, do):
        made = files.load(path, torch_products(dtype=torch.float32), operations=one)
        found.append(generate(made, ids, 2, keep=True))
    (tokens, logits), (others, of_kernels) = found
    assert torch.equal(tokens, others)
    for a, b in zip(logits, of_kernels, strict=True):
        torch.testing.assert_close(b, a, atol=2e-3 * float(a.std()), rtol=0)
    layers = LLAMA["block_count"]
    # a prompt and two tokens, of which each has attention by a kernel but the prompt
    assert launched.count("attention") == 2 * layers
    assert launched.count("swiglu") == 3 * layers
    assert launched.count("add_and_norm") == 3 * (2 * layers + 1)


@pytest.mark.parametrize(
    ("h", "weight", "why"),
    [
        (torch.ones(2, 36), torch.ones(36), "not a multiple of 8 values"),
        (torch.ones(2, 32).double(), torch.ones(32).double(), "float64"),
        (torch.ones(32, 2).T, torch.ones(32), "not contiguous"),
        (torch.ones(65)[1:].view(2, 32), torch.ones(32), "not at a multiple of 16 bytes"),
    ],
)
def test_what_no_kernel_takes_is_torchs(h: Any, weight: Any, why: str) -> None:
    do, launched = simulated()
    y = torch.full_like(h, 0.5, dtype=torch.float16)
    found = do.add_and_norm(h, y, weight, 1e-5, torch.float16)
    wanted = operations.PLAIN.add_and_norm(h, y, weight, 1e-5, torch.float16)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), why
    assert not launched, why


def test_a_mode_that_there_is_not_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="a GPU of compute capability"):
        between.chosen("kernels")
    assert between.chosen("plain") is operations.PLAIN


@pytest.mark.parametrize("cc", [(8, 0), (9, 0)])
def test_kernels_are_the_default_on_a_gpu(monkeypatch: Any, cc: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: cc)
    made = between.chosen()
    assert (made.mode, made.swiglu_overlaps) == ("kernels", True)
    assert made.embedding_rows is operations.PLAIN.embedding_rows
    assert between.chosen("plain") is operations.PLAIN


def test_a_template_takes_addresses(gpu: Any, monkeypatch: Any) -> None:  # noqa: F811
    """What a call launches has the addresses of its tensors, zeros and workspace, and no others."""
    monkeypatch.setattr(between.operator, "stream_of", lambda one: 7)
    qkv, cache = torch.zeros(2, 6 * 64, dtype=torch.float16), torch.zeros(2, 2, 512, 64).half()
    table, position = torch.zeros(512, 64), torch.zeros((), dtype=torch.int64)
    y = torch.zeros(2, 4 * 64, dtype=torch.float16)
    arrays = (qkv, cache, position, table, table.clone(), y)
    made = between.Template(
        lambda *a, machine: between.of_attention(0.0, *a, machine=machine), arrays
    )
    assert made.zeroed == 256
    assert made.nbytes > 0
    made(arrays, 1 << 40, 1 << 41)
    ((name, stream, values),) = gpu.launched
    assert (name, stream) == ("attention", 7)
    assert {one.data_ptr() for one in arrays} <= set(values)
    memory = [v for v in values if 1 << 40 <= v < 1 << 42]
    assert memory == [1 << 41, memory[1], 1 << 40]
    assert memory[1] - memory[0] < made.nbytes
