"""Two ranks in C++: as exact as torch's layers on one, with adapters and given embeddings, and the same bits on both.

Ranks are threads here. Run: pytest ci/unit/models/test_compiled_ranks.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_checkpoints import SHAPE, write_coded_checkpoint
from compiled_network import INSTRUCTIONS, Network, Step, config_of, force_in, needs_compiler
from gguf import GGMLQuantizationType
from gguf_files import Q8_0, write_model
from lora_adapters import RandomAdapter
from random_decoders import HEADS, random_decoder
from thread_ranks import ThreadRanks
from tiny_checkpoints import COMPILED_CONFIGS, COMPILED_FAMILIES, TinyCheckpoint, make_checkpoint, write_checkpoint
from torch import Tensor
from transformers import Qwen2Config

from inflight.config import EngineConfig
from inflight.distributed.parallel_groups import ParallelGroups
from inflight.distributed.pipeline import PipelineGroup
from inflight.distributed.rank_group import RankGroup, SingleRank
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.gguf.folder import make_folder
from inflight.layers.attention import KEYS, VALUES
from inflight.layers.given_embeddings import GivenEmbeddings
from inflight.layers.latent_attention import LATENTS
from inflight.layers.mamba import STATE_SPACE
from inflight.layers.state import CONVOLUTION
from inflight.models.compiled import CompiledNetwork, compile_network, record_network
from inflight.models.decoder import Decoder
from inflight.runtime import loading
from inflight_kernels import cpu
from inflight_kernels.cpu import Instruction

pytestmark = [pytest.mark.slow, needs_compiler, pytest.mark.usefixtures("two_threads")]

LORA = {"max_loras": "2", "lora_cache_max_adapter_size": "16"}
STATES = {CONVOLUTION: 2, STATE_SPACE: 1}
"""Of sequences: the dimension of channels or of heads, which ranks share; here all of them are alike."""
STEPS = {
    "one-token": Step(decodes=[1]),
    "decodes": Step(decodes=[1, 2, 15, 16, 17, 33, 99]),
    "more-rows-than-one-rank-adds-up": Step(decodes=range(1, 40)),
    "prompt": Step(prefills=[(0, 77)]),
    "mixed": Step(decodes=[40, 9], prefills=[(0, 33), (200, 10)]),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[ThreadRanks]:
    ranks = ThreadRanks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module", params=["llama-wide", "qwen3-wide"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """With heads that two ranks can share; of the only key head of the second one both hold a copy."""
    config = copy.deepcopy(COMPILED_CONFIGS[request.param])
    config.num_attention_heads = 6
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = write_checkpoint(folder, config, seed=7, dtype=torch.bfloat16)
    checkpoint.model.float()
    return checkpoint


@dataclass(kw_only=True)
class Part(Network):
    """One rank's part of a network."""

    rank: int
    num_ranks: int
    num_kv_heads: int
    """Of all ranks."""

    def fill_cache(self) -> None:
        first = self.rank * self.num_kv_heads // self.num_ranks
        for number, layer in enumerate(self.cache.states):
            generator = torch.Generator().manual_seed(number)
            for name in filter(layer.__contains__, STATES):
                shape = list(layer[name].shape)
                shape[STATES[name]] = 1
                layer[name].copy_(torch.randn(shape, generator=generator))
            for name in filter(layer.__contains__, (KEYS, VALUES, LATENTS)):
                *places, num_kv_heads, size = layer[name].shape
                # All ranks have the latents of all heads.
                of_all, begin = (1, 0) if name == LATENTS else (self.num_kv_heads, first)
                whole = torch.randn((*places, of_all, size), generator=generator).bfloat16()
                layer[name].copy_(whole[:, :, begin : begin + num_kv_heads])


class Parts:
    """Those of all ranks, with two adapters in slots."""

    def __init__(
        self,
        checkpoint: TinyCheckpoint,
        cpu_compile: str,
        dtype: str,
        ranks: ThreadRanks | None = None,
        moe_expert_parallel_size: int = 1,
    ) -> None:
        self._ranks = ranks
        groups: Sequence[RankGroup] = [SingleRank()] if ranks is None else ranks.rank_groups
        options = {"dtype": dtype, "tensor_parallel_size": str(len(groups)), "num_threads": "1", **LORA}
        options["moe_expert_parallel_size"] = str(moe_expert_parallel_size)
        config = config_of(checkpoint, cpu_compile, **options)
        engines = self._on_each(lambda rank: loading.load_engine(config, groups[rank]))
        self.of_ranks = [
            Part(
                decoder=each.decoder,
                cache=each.store,
                adapters=each.adapters,
                rank=rank,
                num_ranks=len(engines),
                num_kv_heads=checkpoint.model.config.num_key_value_heads,
            )
            for rank, each in enumerate(engines)
        ]
        for slot, rank in enumerate((3, 16)):
            adapter = RandomAdapter.of(checkpoint, slot + 1, rank=rank)
            for part in self.of_ranks:
                matrices = {
                    name: part.adapters.places[name].part(a.bfloat16(), (b * adapter.scale).bfloat16())
                    for name, (a, b) in adapter.matrices.items()
                }
                part.adapters.fill(slot, matrices)

    def logits(self, step: Step, given: GivenEmbeddings | None = None, slots: Sequence[int] | None = None) -> Tensor:
        """The same bits on all ranks."""
        first, *others = self._on_each(lambda rank: self.of_ranks[rank].logits(step, given, slots))
        assert all(torch.equal(first, other) for other in others)
        return first

    def hidden_states(self, step: Step) -> Tensor:
        """The same bits on all ranks."""
        first, *others = self._on_each(lambda rank: self.of_ranks[rank].hidden_states(step))
        assert all(torch.equal(first, other) for other in others)
        return first

    def layers(self, step: Step, wanted: frozenset[int]) -> list[tuple[Tensor, dict[int, Tensor]]]:
        """Of each rank."""
        return self._on_each(lambda rank: self.of_ranks[rank].layers(step, wanted))

    def _on_each(self, compute: Callable[[int], Any]) -> list[Any]:
        return [compute(0)] if self._ranks is None else self._ranks.run(compute)


@pytest.fixture(scope="module")
def exact(checkpoint: TinyCheckpoint) -> Parts:
    return Parts(checkpoint, "false", "float32")


@pytest.fixture(scope="module")
def in_torch(checkpoint: TinyCheckpoint, ranks: ThreadRanks) -> Parts:
    return Parts(checkpoint, "false", "bfloat16", ranks)


@pytest.fixture(scope="module")
def compiled(checkpoint: TinyCheckpoint, ranks: ThreadRanks) -> Parts:
    parts = Parts(checkpoint, "true", "bfloat16", ranks)
    assert all(isinstance(part.decoder, CompiledNetwork) for part in parts.of_ranks)
    return parts


def force(instruction: Instruction, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in parts.of_ranks:
        assert isinstance(part.decoder, CompiledNetwork)
        for program in (part.decoder.hidden_states, part.decoder.head):
            force_in(program, instruction, monkeypatch)


def assert_as_exact(found: Tensor, of_torch: Tensor, exact: Tensor) -> None:
    """2**-9 is one rounding to bfloat16."""
    assert (found - exact).norm() / exact.norm() < 2 * (of_torch - exact).norm() / exact.norm() + 2**-9


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
@pytest.mark.parametrize("name", STEPS)
def test_logits_are_as_exact_as_those_of_torch(
    compiled: Parts, in_torch: Parts, exact: Parts, name: str, instruction: Instruction, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(instruction, compiled, monkeypatch)
    step = STEPS[name]
    assert_as_exact(compiled.logits(step), in_torch.logits(step), exact.logits(step))


@pytest.mark.parametrize(
    "name",
    [
        *("mixtral-wide", "qwen3-moe-wide", "granite-wide", "qwen2-moe-wide", "glm4-moe-wide", "deepseek-v3-wide"),
        *("gpt-oss-wide", "gemma3-wide", "gemma4-wide", "gemma4-experts-wide", "cohere-wide", "olmo2-wide"),
        *("granite-hybrid-wide", "falcon-h1-wide"),
    ],
)
def test_parts_of_families_on_ranks(name: str, ranks: ThreadRanks, tmp_path: Path) -> None:
    """Each rank has some of the inner features of every expert, and some of the heads with their sinks."""
    checkpoint = make_checkpoint(tmp_path, name)
    parts, whole = Parts(checkpoint, "true", "float32", ranks), Parts(checkpoint, "false", "float32")
    assert all(isinstance(part.decoder, CompiledNetwork) for part in parts.of_ranks)
    for step in STEPS.values():
        expected = whole.logits(step)
        assert (parts.logits(step) - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(
    "name",
    [
        *("mixtral-wide", "qwen3-moe-wide", "qwen2-moe-wide", "glm4-moe-wide", "deepseek-v3-wide"),
        *("gemma4-experts-wide", "gpt-oss-wide"),
    ],
)
def test_experts_of_families_that_ranks_have_whole(name: str, ranks: ThreadRanks, tmp_path: Path) -> None:
    config = copy.deepcopy(COMPILED_FAMILIES[name])
    if name == "gpt-oss-wide":
        config.num_local_experts = 6
    checkpoint = write_checkpoint(tmp_path, config, seed=7)
    parts, whole = Parts(checkpoint, "true", "float32", ranks, 2), Parts(checkpoint, "false", "float32")
    assert all(isinstance(part.decoder, CompiledNetwork) for part in parts.of_ranks)
    for step in STEPS.values():
        expected = whole.logits(step)
        assert (parts.logits(step) - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(("name", "kind"), [("mixtral", GGMLQuantizationType.Q4_K), ("qwen3-moe", Q8_0)])
def test_experts_of_gguf_files_on_ranks(
    name: str, kind: GGMLQuantizationType, ranks: ThreadRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of half a block is codes; one of half a group is dense, behind gate and up that are codes."""
    monkeypatch.setattr("inflight.gguf.folder.cache_folder", lambda _: tmp_path)
    model = write_model(tmp_path, name, kind)
    coded = replace(model.dense, folder=make_folder(model.file))
    parts, whole = Parts(coded, "true", "float32", ranks), Parts(model.dense, "false", "float32")
    assert all(isinstance(part.decoder, CompiledNetwork) for part in parts.of_ranks)
    for step in (STEPS["decodes"], STEPS["prompt"]):
        expected = whole.logits(step)
        assert (parts.logits(step) - expected).norm() < 1e-5 * expected.norm()


def test_codes_whose_groups_are_no_neighbours_on_ranks(ranks: ThreadRanks, tmp_path: Path) -> None:
    """Products of all inputs have codes, and those of a rank's share of them floats."""
    config = Qwen2Config(**SHAPE | {"max_position_embeddings": 512})
    checkpoint = write_coded_checkpoint(tmp_path, "gptq-4-reordered", config)
    parts, whole = Parts(checkpoint, "true", "float32", ranks), Parts(checkpoint, "false", "float32")
    assert all(isinstance(part.decoder, CompiledNetwork) for part in parts.of_ranks)
    for step in STEPS.values():
        slots = [row % 3 - 1 for row in range(len(step.decodes) + sum(count for _, count in step.prefills))]
        expected = whole.logits(step, slots=slots)
        assert (parts.logits(step, slots=slots) - expected).norm() < 1e-5 * expected.norm()


def test_adapters(compiled: Parts, in_torch: Parts, exact: Parts) -> None:
    step, slots = STEPS["mixed"], [-1, 1, *[0] * 33, *[-1] * 10]
    expected, found = exact.logits(step, slots=slots), compiled.logits(step, slots=slots)
    assert_as_exact(found, in_torch.logits(step, slots=slots), expected)
    plain = compiled.logits(step)
    without = [place for place, slot in enumerate(slots) if slot < 0]
    assert torch.equal(found[without], plain[without])
    assert not torch.equal(found, plain)


def test_given_embeddings(checkpoint: TinyCheckpoint, compiled: Parts, in_torch: Parts, exact: Parts) -> None:
    """Each is added once, whichever rank has the embedding of the token."""
    step, size = STEPS["mixed"], checkpoint.model.config.hidden_size
    rows_GD = torch.randn(4, size, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    given = GivenEmbeddings(places_G=torch.tensor([14, 1, 4, 40]), rows_GD=rows_GD)
    found = compiled.logits(step, given)
    assert_as_exact(found, in_torch.logits(step, given), exact.logits(step, given))
    assert not torch.equal(found, compiled.logits(step))


@pytest.mark.parametrize("name", ["decodes", "mixed"])
def test_outputs_of_layers_change_no_bit(compiled: Parts, name: str) -> None:
    """And each is whole on every rank."""
    expected = compiled.hidden_states(STEPS[name])
    (found, outputs), *others = compiled.layers(STEPS[name], frozenset({0, 2}))
    assert torch.equal(found, expected)
    for _, other in others:
        assert outputs.keys() == other.keys()
        assert all(torch.equal(outputs[number], other[number]) for number in outputs)


@pytest.mark.parametrize("name", STEPS)
def test_a_stage_ends_with_the_whole_residual_stream(
    first_stage: Parts, in_torch: Parts, exact: Parts, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all ranks: it goes to the next pipeline stage."""
    for part in (*in_torch.of_ranks, *exact.of_ranks):
        monkeypatch.setattr(part, "decoder", replace(part.decoder, head=None))
    found, of_torch, wanted = (parts.hidden_states(STEPS[name]) for parts in (first_stage, in_torch, exact))
    assert_as_exact(found.float(), of_torch.float(), wanted)


@pytest.fixture(scope="module")
def first_stage(checkpoint: TinyCheckpoint, ranks: ThreadRanks) -> Parts:
    """All layers in C++, without the head."""
    parts = Parts(checkpoint, "false", "bfloat16", ranks)
    groups = ranks.connect()

    def compile_part(rank: int) -> CompiledNetwork:
        part = parts.of_ranks[rank]
        assert isinstance(part.decoder, Decoder)
        stage = replace(part.decoder, head=None)
        recordings = record_network(stage, part.cache.states, torch.device("cpu"), groups[rank])
        library = cpu.load_library()
        program = cpu.Program(library, recordings.hidden_states, cpu.WeightPacker(library, recordings.all))
        return CompiledNetwork(
            state_specs=stage.state_specs, sum_order="", hidden_states=program, head=None, by_layer=()
        )

    for part, network in zip(parts.of_ranks, ranks.run(compile_part), strict=True):
        part.decoder = network
    return parts


def test_ranks_compute_in_c_all_or_none(
    checkpoint: TinyCheckpoint, ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that cannot load the library keeps the others from it: their sums would not meet."""
    load, calls = cpu.load_library, iter(range(2))

    def fail_once(dtype: torch.dtype, order: cpu.Order) -> cpu.NativeLibrary:
        if next(calls) == 1:
            raise cpu.LibraryUnavailable("this one has no compiler")
        return load(dtype, order=order)

    monkeypatch.setattr(cpu, "load_library", fail_once)
    with caplog.at_level("INFO"):
        parts = Parts(checkpoint, "auto", "bfloat16", ranks)
    assert not any(isinstance(part.decoder, CompiledNetwork) for part in parts.of_ranks)
    for reason in ("this one has no compiler", "another rank cannot compute in C++"):
        assert f"the layers run in torch, several times slower: {reason}" in caplog.text


class Sockets(TensorParallelGroup):
    can_be_recorded = False


def test_ranks_without_common_memory_compute_in_torch() -> None:
    decoder, cache = random_decoder(HEADS[2], torch.bfloat16)
    arguments = (decoder, cache.states, torch.device("cpu"), ParallelGroups(tensor=Sockets()))
    assert compile_network(EngineConfig(cpu_compile="auto"), *arguments) is decoder
    with pytest.raises(ConfigurationError, match=r"layers in C\+\+ are for ranks that share memory, and these sum"):
        compile_network(EngineConfig(cpu_compile="true"), *arguments)


class OtherStages(PipelineGroup):
    def all_reduce_min(self, value: int) -> int:
        return min(int(str(value)), 0)  # it travels as text


def test_a_stage_computes_in_torch_if_another_one_cannot_in_cpp() -> None:
    """Else a token's bits would depend on its batch, though the engine is described as one of C++."""
    decoder, cache = random_decoder(HEADS[2], torch.bfloat16)
    arguments = (decoder, cache.states, torch.device("cpu"), ParallelGroups(pipeline=OtherStages()))
    assert compile_network(EngineConfig(cpu_compile="auto"), *arguments) is decoder
    with pytest.raises(ConfigurationError, match=r"another rank cannot compute in C\+\+"):
        compile_network(EngineConfig(cpu_compile="true"), *arguments)


def test_steps_that_do_not_fit_into_the_common_memory_are_refused(ranks: ThreadRanks) -> None:
    """Two parts of 64 features of a rank, of 2 bytes each, in 512 MiB."""
    groups = ranks.connect()
    config = EngineConfig(cpu_compile="true", max_num_tokens=2**21)

    def refusal(rank: int) -> str:
        decoder, cache = random_decoder(HEADS[2], torch.bfloat16, groups[rank])
        try:
            compile_network(config, decoder, cache.states, torch.device("cpu"), ParallelGroups(tensor=groups[rank]))
        except ConfigurationError as error:
            return str(error)
        return ""

    reason = "the memory that the ranks share has room for 2097120; set cpu_compile to auto or false"
    for found in ranks.run(refusal):
        assert found.endswith(reason)
