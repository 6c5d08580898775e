"""A network that C++ has no code for stays in torch, with a reason that names what is unknown.

Run: pytest ci/unit/models/test_compiled_parts.py
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from compiled_network import Network, config_of
from tiny_checkpoints import TinyCheckpoint, make_checkpoint

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.layers.attention import AttentionMetadata, LayerCache
from inflight.models import compiled, compiled_parts
from inflight.models.compiled_parts import KNOWN_ATTRIBUTES, find_unknown
from inflight.models.decoder import Decoder

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
PARTS: dict[str, tuple[str, str]] = {
    "layers[1]": ("layers.1", "DecoderLayer"),
    "layers[1].input_norm": ("layers.1.input_norm", "RMSNorm"),
    "layers[1].qkv": ("layers.1.qkv", "ColumnParallelLinear"),
    "layers[1].attention": ("layers.1.attention", "Attention"),
    "layers[1].output": ("layers.1.output", "RowParallelLinear"),
    "layers[1].post_attention_norm": ("layers.1.post_attention_norm", "RMSNorm"),
    "layers[1].mlp": ("layers.1.mlp", "GatedMLP"),
    "layers[1].mlp.gate_up": ("layers.1.mlp.gate_up", "ColumnParallelLinear"),
    "layers[1].mlp.down": ("layers.1.mlp.down", "RowParallelLinear"),
    "norm": ("norm", "RMSNorm"),
    "head": ("head", "VocabularyParallelHead"),
}
"""Name in the reason: path from the decoder, type."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3-wide", dtype=torch.bfloat16)


@pytest.fixture
def decoder(checkpoint: TinyCheckpoint) -> Decoder:
    decoder = Network.load(checkpoint, "false", "bfloat16").decoder
    assert isinstance(decoder, Decoder)
    return decoder


def get(owner: object, name: str) -> object:
    return owner[int(name)] if isinstance(owner, list) else getattr(owner, name)  # type: ignore[no-any-return]


def put(decoder: Decoder, path: str, change: Callable[[object], object]) -> None:
    """Change what lies at `path`."""
    *above, last = path.split(".")
    owner = functools.reduce(get, above, decoder)
    changed = change(get(owner, last))
    if isinstance(owner, list):
        owner[int(last)] = changed
    else:
        setattr(owner, last, changed)


def test_what_is_there_today_is_known(decoder: Decoder) -> None:
    assert find_unknown(decoder) == ""


@pytest.mark.parametrize("name", PARTS)
def test_a_subclass_of_any_part_is_refused(decoder: Decoder, name: str) -> None:
    def specialise(part: object) -> object:
        values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}  # type: ignore[arg-type]
        return type("Special", (type(part),), {})(**values)

    path, expected = PARTS[name]
    put(decoder, path, specialise)
    assert find_unknown(decoder) == f"C++ has no code for {name}, a Special instead of a {expected}"


def test_a_subclass_of_the_network_is_refused(decoder: Decoder) -> None:
    special = type("Special", (Decoder,), {})
    other = special(embedding=decoder.embedding, layers=decoder.layers, norm=decoder.norm, head=decoder.head)
    assert find_unknown(other) == "C++ has no code for the network, a Special instead of a Decoder"


@pytest.mark.parametrize("part_type", KNOWN_ATTRIBUTES, ids=lambda part_type: part_type.__name__)
@pytest.mark.parametrize("slots", [True, False])
def test_an_attribute_that_any_part_gets_is_refused(
    decoder: Decoder, part_type: type, slots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the field stood in the part's own class."""
    extended = dataclasses.make_dataclass(
        part_type.__name__,
        [("bias_D", torch.Tensor | None, None)],
        bases=(part_type,),
        slots=slots,
        kw_only=True,
        frozen=part_type in (LayerCache, AttentionMetadata),
    )
    known = {(extended if known is part_type else known): names for known, names in KNOWN_ATTRIBUTES.items()}
    monkeypatch.setattr(compiled_parts, "KNOWN_ATTRIBUTES", known)
    monkeypatch.setattr(compiled_parts, "_parts", lambda decoder: [])
    unknown = "bias_D" if slots else "__dict__"
    assert find_unknown(decoder) == f"C++ has no code for {part_type.__name__}.{unknown}"


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("layers.1.attention.scale", 0.5, "layers[1].attention.scale is not that of the first layer"),
        ("layers.2.attention.norm_eps", 0.5, "layers[2].attention.norm_eps is not that of the first layer"),
        ("layers.1.input_norm.eps", 0.5, "layers[1].input_norm.eps is not that of the first norm"),
        ("layers.0.post_attention_norm.eps", 0.5, "layers[0].post_attention_norm.eps is not that of the first norm"),
        ("norm.eps", 0.5, "norm.eps is not that of the first norm"),
    ],
)
def test_layers_that_differ_are_refused(decoder: Decoder, path: str, value: float, reason: str) -> None:
    put(decoder, path, lambda _: value)
    assert find_unknown(decoder) == reason


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("layers.1.attention.cos_sin", "layers[1].attention.cos_sin is not that of the first layer"),
        ("layers.2.mlp.down.weight.values_OI", "layers[2].mlp is not of the first layer's size"),
    ],
)
def test_tensors_that_differ_are_refused(decoder: Decoder, path: str, reason: str) -> None:
    put(decoder, path, lambda tensor: tensor[:, :-1].clone())  # type: ignore[index]
    assert find_unknown(decoder) == reason


@pytest.mark.parametrize("path", ["layers.1.input_norm.weight_D", "layers.0.attention.k_norm_E", "head.weight_UD"])
def test_another_type_of_numbers_is_refused(decoder: Decoder, path: str) -> None:
    put(decoder, path, lambda tensor: tensor.float())  # type: ignore[attr-defined]
    name = path.replace("layers.1", "layers[1]").replace("layers.0", "layers[0]")
    assert find_unknown(decoder) == f"{name} is torch.float32 and not torch.bfloat16"


def test_torch_runs_what_is_unknown_and_the_log_says_why(
    checkpoint: TinyCheckpoint, decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    decoder.norm.eps = 0.5

    def config(cpu_compile: str) -> EngineConfig:
        return config_of(checkpoint, cpu_compile, dtype="bfloat16")

    with caplog.at_level("INFO"):
        assert not compiled.should_compile(config("auto"), decoder, CPU)
    assert "the layers run in torch, several times slower: norm.eps is not that of the first norm" in caplog.text
    with pytest.raises(ConfigurationError, match=r"cpu_compile is true, but norm\.eps is not"):
        compiled.should_compile(config("true"), decoder, CPU)
