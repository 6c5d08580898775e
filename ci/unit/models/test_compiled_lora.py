"""Adapters in layers compiled for this CPU are as exact as in torch, and cost tokens without one nothing, not a bit.

Run: pytest ci/unit/models/test_compiled_lora.py
"""

from __future__ import annotations

import pytest
import torch
from compiled_network import Network, Step, needs_compiler
from lora_adapters import RandomAdapter
from tiny_checkpoints import COMPILED_CONFIGS, TinyCheckpoint, make_checkpoint

from inflight.models.compiled import CompiledNetwork

pytestmark = [pytest.mark.slow, needs_compiler, pytest.mark.usefixtures("two_threads")]

OPTIONS = {"max_loras": "4", "lora_cache_max_adapter_size": "40"}
STEPS = {
    "one-token": (Step(decodes=[1]), [1]),
    "decodes": (Step(decodes=[1, 2, 15, 16, 17, 33, 99]), [0, -1, 2, 1, 1, 3, -1]),
    "more-decodes-than-a-tile": (Step(decodes=range(1, 40)), [slot % 5 - 1 for slot in range(39)]),
    "mixed": (Step(decodes=[40, 9], prefills=[(0, 33), (200, 10)]), [-1, 2] + [1] * 33 + [-1] * 10),
    "prompt": (Step(prefills=[(0, 77)]), [2] * 77),
}
"""With the slot of each token. Slot 3 is empty, as that of an adapter of other layers."""


@pytest.fixture(scope="module", params=list(COMPILED_CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, dtype=torch.bfloat16)
    checkpoint.model.float()
    return checkpoint


def load(checkpoint: TinyCheckpoint, cpu_compile: str, dtype: str) -> Network:
    """With three adapters of several ranks; the first one's slot has held a wider one before."""
    network = Network.load(checkpoint, cpu_compile, dtype, **OPTIONS)
    adapters = [
        RandomAdapter.of(checkpoint, 9, rank=40),
        RandomAdapter.of(checkpoint, 1, rank=3, targets=("q_proj", "v_proj", "up_proj")),
        RandomAdapter.of(checkpoint, 2, rank=16),
        RandomAdapter.of(checkpoint, 3, rank=33, targets=("o_proj", "down_proj", "gate_proj")),
    ]
    for slot, adapter in zip((0, 0, 1, 2), adapters, strict=True):
        places = network.adapters.places
        parts = {
            name: places[name].part(a.bfloat16(), (b * adapter.scale).bfloat16())
            for name, (a, b) in adapter.matrices.items()
        }
        network.adapters.fill(slot, parts)
    return network


@pytest.fixture(scope="module")
def compiled_network(checkpoint: TinyCheckpoint) -> Network:
    network = load(checkpoint, "true", "bfloat16")
    assert isinstance(network.decoder, CompiledNetwork)
    return network


@pytest.fixture(scope="module")
def torch_network(checkpoint: TinyCheckpoint) -> Network:
    return load(checkpoint, "false", "bfloat16")


@pytest.fixture(scope="module")
def exact_network(checkpoint: TinyCheckpoint) -> Network:
    return load(checkpoint, "false", "float32")


@pytest.mark.parametrize("name", STEPS)
def test_logits_are_as_exact_as_those_of_torch(
    compiled_network: Network, torch_network: Network, exact_network: Network, name: str
) -> None:
    step, slots = STEPS[name]
    exact = exact_network.logits(step, slots=slots)
    of_torch = (torch_network.logits(step, slots=slots) - exact).norm() / exact.norm()
    ours = (compiled_network.logits(step, slots=slots) - exact).norm() / exact.norm()
    assert ours < 2 * of_torch + 2**-9
    # What the adapters change is far more than what is rounded.
    assert (exact_network.logits(step) - exact).norm() / exact.norm() > 10 * ours


@pytest.mark.parametrize("name", STEPS)
def test_tokens_without_an_adapter_have_the_bits_of_a_network_without_adapters(
    checkpoint: TinyCheckpoint, compiled_network: Network, name: str
) -> None:
    plain = Network.load(checkpoint, "true", "bfloat16")
    step, slots = STEPS[name]
    expected = plain.logits(step)
    assert torch.equal(compiled_network.logits(step), expected)
    assert torch.equal(compiled_network.logits(step, slots=[-1] * len(slots)), expected)
    # A prompt's tokens depend on those before them, so only whole rows without adapters can be compared.
    without = [place for place, slot in enumerate(slots) if slot < 0]
    assert torch.equal(compiled_network.logits(step, slots=slots)[without], expected[without])
