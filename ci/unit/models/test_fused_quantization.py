"""In fp8 networks, norms and gated activations quantise tokens for the product behind them, wherever it takes them so:
every bit is as if the product had quantised them, beside dense layers, with adapters, in outputs of layers.

Run: pytest ci/unit/models/test_fused_quantization.py
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_network import Network, Step
from fp8_checkpoints import write_fp8_checkpoint
from lora_adapters import RandomAdapter
from tiny_checkpoints import SIZES, TinyCheckpoint
from torch import Tensor
from transformers import Qwen2Config

import inflight_kernels
from inflight.layers import fp8
from inflight.layers.fp8 import Fp8GatedMLP, Fp8Linear, Fp8RMSNorm
from inflight.layers.given_embeddings import GivenEmbeddings
from inflight.layers.linear import ColumnParallelLinear
from inflight.layers.mlp import GatedMLP
from inflight.layers.norm import RMSNorm
from inflight.models import branch_loading
from inflight.models.decoder import Decoder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

WIDE = Qwen2Config(**{**SIZES, "hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 4})
"""Of some groups of inputs, the last ones half full."""
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP, DOWN = ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)
CASES: dict[str, tuple[tuple[str, ...], int, dict[str, Any]]] = {
    "all": ((), 3, {}),
    "a dense layer": ((*ATTENTION, "self_attn.o_proj", *GATE_UP, *DOWN), 2, {}),
    "dense attention": (ATTENTION, 3, {}),
    "dense gate": (GATE_UP, 4, {}),
    "dense down": (DOWN, 4, {}),
    "all static": ((), 3, {"static": True}),
    "dense down, others static": (DOWN, 4, {"static": True}),
    "all by blocks": ((), 3, {"strategy": "block", "config": WIDE}),
    "dense down, others by blocks": (DOWN, 4, {"strategy": "block", "config": WIDE}),
}
"""What of the second of three layers is dense; how many products then quantise what they multiply: those of what
attention gives, and of an MLP that is half dense; and which scales the checkpoint has."""
FUSED = ("rms_norm_quantized", "embedding_rms_norm_quantized", "activate_and_mul_quantized")
STEP = Step(decodes=[1, 9], prefills=[(0, 13), (4, 7)])
PROMPT = Step(prefills=[(0, 11)])
SAME = 0.02
"""Bound of log probabilities: another order of additions moves a few activations to a neighbouring number of fp8."""
WITH_ADAPTERS = {"max_loras": "2", "lora_cache_max_adapter_size": "8"}


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyCheckpoint, int]:
    names, num_apart, options = CASES[request.param]
    dense = [f"model.layers.1.{name}" for name in names]
    return write_fp8_checkpoint(tmp_path_factory.mktemp("fp8"), dense=dense, **options), num_apart


@pytest.fixture
def checkpoint(tmp_path: Path) -> TinyCheckpoint:
    return write_fp8_checkpoint(tmp_path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of the operations that quantise."""
    counted: Counter[str] = Counter()

    def counting(name: str) -> Any:
        operation = getattr(inflight_kernels, name)

        def call(*arguments: Any, **options: Any) -> Any:
            counted[name] += 1
            return operation(*arguments, **options)

        return call

    for name in ("quantize_per_token", *FUSED):
        monkeypatch.setattr(inflight_kernels, name, counting(name))
    return counted


def load(checkpoint: TinyCheckpoint, **options: str) -> Network:
    return Network.load(checkpoint, "false", "float32", **options)


def load_apart(checkpoint: TinyCheckpoint) -> Network:
    """Whose products all quantise what they multiply."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branch_loading, "fuse_quantization", lambda norm, part: (norm, part))
        return load(checkpoint)


def outputs(network: Network, given: GivenEmbeddings | None = None) -> list[Tensor]:
    """Hidden states, and what each layer puts out."""
    network.fill_cache()
    metadata = STEP.metadata(given)
    assert isinstance(network.decoder, Decoder)
    with torch.inference_mode():
        token_ids = torch.arange(len(metadata.positions_T)) + 7
        hidden, of_layers = network.decoder.forward_layers(
            token_ids, network.cache.states, metadata, frozenset(range(3))
        )
    return [hidden, *(of_layers[number] for number in range(3))]


def is_same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# -- which parts, and their bits ---------------------------------------------------------------------------------------


def test_only_what_no_norm_or_activation_makes_is_quantised_apart(
    case: tuple[TinyCheckpoint, int], calls: Counter[str]
) -> None:
    checkpoint, num_apart = case
    outputs(load(checkpoint))
    assert calls["quantize_per_token"] == num_apart
    num_fused = sum(calls[name] for name in FUSED)
    calls.clear()
    outputs(load_apart(checkpoint))
    assert calls == {"quantize_per_token": num_apart + num_fused}


@pytest.mark.parametrize("is_given", [False, True], ids=["token ids", "given embeddings"])
def test_no_bit_depends_on_who_quantises(case: tuple[TinyCheckpoint, int], is_given: bool) -> None:
    checkpoint, _ = case
    rows_GD = torch.full((2, checkpoint.model.config.hidden_size), 0.25)
    given = GivenEmbeddings(places_G=torch.tensor([1, 5]), rows_GD=rows_GD) if is_given else None
    assert is_same(outputs(load(checkpoint), given), outputs(load_apart(checkpoint), given))


@pytest.mark.parametrize("name", FUSED)
def test_a_wrong_scale_is_noticed(name: str, checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = getattr(inflight_kernels, name)

    def doubled(*arguments: Any, **options: Any) -> Any:
        values, scale, *others = operation(*arguments, **options)
        return (values, 2 * scale, *others)

    expected = outputs(load_apart(checkpoint))
    monkeypatch.setattr(inflight_kernels, name, doubled)
    assert is_same(outputs(load_apart(checkpoint)), expected)
    assert not is_same(outputs(load(checkpoint)), expected)


@pytest.mark.parametrize("name", FUSED)
def test_a_static_scale_that_is_left_out_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_fp8_checkpoint(tmp_path, static=True)
    operation, expected = getattr(inflight_kernels, name), outputs(load(checkpoint))

    def without_scale(*arguments: Any, scale: float, **options: Any) -> Any:
        return operation(*arguments, **options)

    monkeypatch.setattr(inflight_kernels, name, without_scale)
    assert not is_same(outputs(load(checkpoint)), expected)


# -- adapters ----------------------------------------------------------------------------------------------------------


def fill(network: Network) -> RandomAdapter:
    """Put an adapter of all layers into the second slot."""
    generator = torch.Generator().manual_seed(4)
    places = network.adapters.places
    matrices = {
        name: (
            torch.randn(4, place.num_inputs, generator=generator) / 2,
            torch.randn(place.num_outputs, 4, generator=generator) / 16,
        )
        for name, place in places.items()
    }
    network.adapters.fill(1, {name: places[name].part(*pair) for name, pair in matrices.items()})
    return RandomAdapter(matrices, rank=4, alpha=4.0, use_rslora=False)


def distance(checkpoint: TinyCheckpoint, network: Network, adapter: RandomAdapter) -> float:
    """The largest difference between the log probabilities of a prompt with the adapter and those of transformers."""
    modules = dict(checkpoint.model.named_modules())
    hooks = [
        modules[name].register_forward_hook(lambda _, inputs, y, a=a, b=b: y + inputs[0] @ a.T @ b.T)
        for name, (a, b) in adapter.matrices.items()
    ]
    token_ids = torch.randint(0, 203, (11,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = checkpoint.model(token_ids[None]).logits[0].log_softmax(-1)
    for hook in hooks:
        hook.remove()
    return float((network.logits(PROMPT, slots=[1] * 11).log_softmax(-1) - expected).abs().max())


@pytest.mark.parametrize("static", [False, True])
def test_adapters_multiply_floats(static: bool, tmp_path: Path, calls: Counter[str]) -> None:
    checkpoint = write_fp8_checkpoint(tmp_path, static=static)
    network = load(checkpoint, **WITH_ADAPTERS)
    adapter = fill(network)
    assert distance(checkpoint, network, adapter) < SAME
    assert calls == {"quantize_per_token": 12}
    plain = network.logits(PROMPT, slots=[-1] * 11).log_softmax(-1)
    assert (network.logits(PROMPT, slots=[1] * 11).log_softmax(-1) - plain).abs().max() > 1


def test_with_deterministic_a_token_without_adapter_has_the_bits_of_an_engine_without_adapters(
    checkpoint: TinyCheckpoint,
) -> None:
    network = load(checkpoint, deterministic="true", **WITH_ADAPTERS)
    fill(network)
    expected = load(checkpoint, deterministic="true").hidden_states(STEP)
    found = network.hidden_states(STEP, slots=[1, -1] + [1] * 13 + [-1] * 7)
    is_plain = torch.tensor([False, True] + [False] * 13 + [True] * 7)
    assert torch.equal(found[is_plain], expected[is_plain])
    assert not torch.equal(found[~is_plain], expected[~is_plain])


def test_adapters_that_are_left_out_are_noticed(checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fp8, "_of_tokens_in_fp8", lambda linear: Fp8Linear(linear.weight, linear.bias_O, linear.deterministic)
    )
    network = load(checkpoint, **WITH_ADAPTERS)
    assert distance(checkpoint, network, fill(network)) > 1


# -- composition -------------------------------------------------------------------------------------------------------


def test_what_is_not_quantised_gets_floats(tmp_path: Path) -> None:
    dense = [f"model.layers.1.{name}" for name in (*ATTENTION, *DOWN)]
    network = load(write_fp8_checkpoint(tmp_path, dense=dense)).decoder
    assert isinstance(network, Decoder) and type(network.norm) is RMSNorm
    parts = [
        [
            type(part)
            for part in (layer.norm, layer.branches[0].stateful.qkv, layer.branches[1].norm, layer.branches[1].part)
        ]
        for layer in network.layers
    ]
    assert parts[0] == parts[2] == [Fp8RMSNorm, Fp8Linear, Fp8RMSNorm, Fp8GatedMLP]
    assert parts[1] == [RMSNorm, ColumnParallelLinear, RMSNorm, GatedMLP]
