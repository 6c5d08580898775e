"""Greedy tokens equal transformers' own, for each architecture: alone, in mixed batches, chunked, with shared prefixes,
after a pause. float32, so that equality means the same network and not the same rounding.

Run: pytest ci/unit/models/test_models.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_driver import Driver, Work
from safetensors.torch import load_file, save_file
from tiny_checkpoints import CONFIGS, TinyCheckpoint, make_checkpoint, make_prompt, write_checkpoint
from transformers import AutoModelForCausalLM

from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.models.adapter_places import AdapterPlaces
from inflight.models.checkpoint import Checkpoint
from inflight.models.config import ModelConfig
from inflight.models.decoder_loading import load_decoder
from inflight.models.weights import WeightLoader
from inflight.runtime.model_runner import ModelRunner

pytestmark = pytest.mark.slow

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
BLOCK_SIZE = 4
NUM_TOKENS = 24


def load(checkpoint: TinyCheckpoint, device: str, **options: Any) -> ModelRunner:
    config = EngineConfig(
        gpt_model_path=str(checkpoint.folder),
        device=device,
        model_impl="native",  # or what is no longer native would pass, computed by transformers
        max_batch_size=8,
        max_num_tokens=256,
        tokens_per_block=BLOCK_SIZE,
        max_tokens_in_paged_kv_cache=1024,
        cpu_compile="false",  # it is for bfloat16, and has tests of its own
        **{"max_seq_len": 100, **options},
    )
    return ModelRunner.load(config, SingleRank())


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=list(CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def runner(checkpoint: TinyCheckpoint, device: str) -> Iterator[ModelRunner]:
    runner = load(checkpoint, device)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def pairs(checkpoint: TinyCheckpoint) -> list[tuple[list[int], list[int]]]:
    return [checkpoint.prompt(length, NUM_TOKENS) for length in (1, 5, 8, 19, 33)]


@pytest.fixture(scope="module")
def prompts(pairs: list[tuple[list[int], list[int]]]) -> list[list[int]]:
    return [prompt for prompt, _ in pairs]


@pytest.fixture(scope="module")
def expected(pairs: list[tuple[list[int], list[int]]]) -> list[list[int]]:
    return [tokens for _, tokens in pairs]


def works(prompts: list[list[int]], **options: Any) -> list[Work]:
    return [Work(prompt=prompt, max_tokens=NUM_TOKENS, **options) for prompt in prompts]


def test_alone(runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]]) -> None:
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert Driver(runner).run(works([prompt])) == [tokens]


def test_expected_tokens_vary(expected: list[list[int]]) -> None:
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert sum(len(set(tokens)) > 4 for tokens in expected) >= 3


@pytest.mark.parametrize("max_outstanding", [1, 2])
def test_in_a_mixed_batch(
    runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]], max_outstanding: int
) -> None:
    """Sequences join while others decode, so that steps hold decodes and prefills of all lengths."""
    batch = works(prompts)
    for place, work in enumerate(batch):
        work.arrives = 3 * place
    assert Driver(runner, max_outstanding).run(batch) == expected


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_in_chunks(runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]], chunk: int) -> None:
    batch = works(prompts, chunk=chunk)
    batch[0].arrives, batch[3].arrives = 4, 2
    assert Driver(runner).run(batch) == expected


@pytest.mark.parametrize("num_blocks", [1, 4])
def test_with_a_shared_prefix(
    runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]], num_blocks: int
) -> None:
    """A prompt whose first blocks another sequence computed, while that one goes on and after it is done."""
    prompt, tokens = prompts[3], expected[3]
    first = Work(prompt=prompt[: 4 * BLOCK_SIZE] + make_prompt(5, seed=1), max_tokens=NUM_TOKENS)
    during = Work(prompt=prompt, max_tokens=NUM_TOKENS, arrives=4, shares=first, shared_blocks=num_blocks)
    driver = Driver(runner)
    driver.run([first, during])
    after = Work(prompt=prompt, max_tokens=NUM_TOKENS, shares=first, shared_blocks=num_blocks)
    driver.run([after])
    assert during.output == tokens
    assert after.output == tokens


@pytest.mark.parametrize("pauses_at", [1, 9])
def test_after_a_pause(
    runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]], pauses_at: int
) -> None:
    """A sequence that lost its blocks prefills prompt and output, in another row, and goes on with the same tokens."""
    batch = works(prompts)
    batch[1].pauses_at = batch[4].pauses_at = pauses_at
    assert Driver(runner).run(batch) == expected


@pytest.mark.parametrize("name", ["gpt2", "llama-tied"])
def test_a_checkpoint_that_was_saved_without_its_head(tmp_path: Path, device: str, name: str) -> None:
    """Its names lack the first one, as those of OpenAI's GPT-2 do. Adapters have it."""
    checkpoint = make_checkpoint(tmp_path, name)
    prompt, tokens = checkpoint.prompt(9, NUM_TOKENS)
    checkpoint.model.base_model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    architectures = [type(checkpoint.model).__name__]
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
    names = load_file(tmp_path / "model.safetensors").keys()
    assert not any(each.startswith(("transformer.", "model.")) for each in names)
    runner = load(checkpoint, device)
    assert Driver(runner).run(works([prompt])) == [tokens]
    runner.close()
    places, model = AdapterPlaces(), ModelConfig.load(tmp_path)
    with Checkpoint(tmp_path) as tensors:
        cpu, group = torch.device("cpu"), TensorParallelGroup()
        load_decoder(model, WeightLoader(tensors, model.weight_format, group, torch.float32, cpu, places), 16)
    assert places.places and all(each.startswith(model.family.layers) for each in places.places)
    assert set(places.numbered.values()) == places.places.keys()


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("bamba", {"time_step_limit": (0.5, 0.8)}),
        # Under the first name transformers has the lower limit.
        ("nemotron-h", {"time_step_min": 0.7, "time_step_limit": (0.7, float("inf"))}),
    ],
)
def test_limits_of_time(tmp_path: Path, device: str, name: str, limits: dict[str, Any]) -> None:
    """They hold for all tokens, as transformers has it for answers only where it computes them with the prompt."""
    checkpoint = make_checkpoint(tmp_path / "unlimited", name)
    prompt, free = checkpoint.prompt(9, NUM_TOKENS)
    checkpoint = write_checkpoint(tmp_path, type(CONFIGS[name])(**CONFIGS[name].to_dict() | limits), len(name))
    checkpoint.model.generation_config.use_cache = False
    prompt, tokens = checkpoint.prompt(9, NUM_TOKENS)
    runner = load(checkpoint, device)
    assert Driver(runner).run(works([prompt], chunk=4)) == [tokens]
    runner.close()
    assert tokens != free


@pytest.mark.parametrize("own", [False, True])
def test_a_head_beside_the_embedding_that_config_json_ties_it_to(tmp_path: Path, device: str, own: bool) -> None:
    """transformers computes with the one that is there, which in checkpoints of Nemotron-H is never the embedding."""
    tied = make_checkpoint(tmp_path, "llama-tied")
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"] = head.flip(0).contiguous() if own else head
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    checkpoint = TinyCheckpoint(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    prompt, expected = checkpoint.prompt(13, NUM_TOKENS)
    assert (expected == tied.expected(prompt, NUM_TOKENS)) is not own
    runner = load(checkpoint, device)
    assert Driver(runner).run(works([prompt])) == [expected]
    runner.close()


@pytest.mark.parametrize("name", ["llama-tied", "qwen3", "qwen3-moe"])
def test_sharded_checkpoint(tmp_path: Path, device: str, name: str) -> None:
    checkpoint = make_checkpoint(tmp_path, name, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    runner = load(checkpoint, device)
    prompt, expected = checkpoint.prompt(13, NUM_TOKENS)
    assert Driver(runner).run(works([prompt])) == [expected]
    runner.close()


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral-window", "minimax-m2", "qwen2-moe", "glm4-moe", "granite-moe"])
def test_experts_in_stacked_tensors(tmp_path: Path, device: str, name: str) -> None:
    """As transformers stores them on request."""
    checkpoint = make_checkpoint(tmp_path, name, save_original_format=False)
    assert any(tensor.endswith(".experts.gate_up_proj") for tensor in load_file(tmp_path / "model.safetensors"))
    runner = load(checkpoint, device)
    prompt, expected = checkpoint.prompt(13, NUM_TOKENS)
    assert Driver(runner).run(works([prompt])) == [expected]
    runner.close()


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral-window", "qwen2-moe", "glm4-moe-groups"])
def test_experts_are_deterministic(tmp_path: Path, name: str) -> None:
    """The same bits alone and beside others, in chunks, whichever experts those go to."""
    runner = load(make_checkpoint(tmp_path, name, dtype=torch.bfloat16), "cpu", deterministic=True)
    prompts = [make_prompt(length) for length in (5, 19, 33)]
    alone, together = (works(prompts, log_probs=True, chunk=chunk) for chunk in (100, 7))
    for work in alone:
        Driver(runner).run([work])
    Driver(runner).run(together)
    assert [work.output_log_probs for work in alone] == [work.output_log_probs for work in together]
    assert [work.output for work in alone] == [work.output for work in together]
    runner.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(tmp_path: Path, device: str, dtype: torch.dtype) -> None:
    """Computed in the checkpoint's type: log probabilities agree with float32's within its rounding."""
    checkpoint = make_checkpoint(tmp_path, "llama", dtype=dtype)
    runner = load(checkpoint, device)
    work = Work(prompt=make_prompt(20), max_tokens=6, log_probs=True)
    Driver(runner).run([work])
    runner.close()
    with torch.inference_mode():
        logits = checkpoint.model.float()(torch.tensor([work.token_ids])).logits[0]
    log_probs = logits[19:-1].log_softmax(-1)
    reference = log_probs.gather(1, torch.tensor(work.output)[:, None])[:, 0]
    tolerance = 0.3 if dtype is torch.bfloat16 else 0.05
    torch.testing.assert_close(torch.tensor(work.output_log_probs), reference, rtol=0, atol=tolerance)


def test_limits(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama")
    runner = load(checkpoint, "cpu", max_seq_len=0, max_input_len=50)
    assert runner.limits.max_seq_len == 128
    assert runner.limits.max_input_len == 50
    assert runner.limits.vocab_size == 203
    assert runner.limits.kv_cache_tokens == runner.num_blocks * runner.block_size == 1024
    runner.close()


def test_the_default_checkpoint(device: str) -> None:
    """The trained one, with its real vocabulary and lengths."""
    folder = Path(__file__).parents[3] / "model_repository" / "llm" / "1" / "checkpoint"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    checkpoint = TinyCheckpoint(folder, model)
    pairs = [checkpoint.prompt(length, 40) for length in (2, 30, 90)]
    runner = load(checkpoint, device, dtype="float32", max_seq_len=160)
    outputs = Driver(runner).run([Work(prompt=prompt, max_tokens=40, chunk=32) for prompt, _ in pairs])
    runner.close()
    assert outputs == [tokens for _, tokens in pairs]


@pytest.mark.parametrize(
    ("changes", "layers", "words"),
    [
        ({}, range(2), r"hidden_size_per_layer_input.* set pipeline_parallel_size to 1"),
        (
            {"hidden_size_per_layer_input": 0},
            range(1, 5),
            "layer 2 of .* attends to the keys and values of layer 0, which",
        ),
    ],
)
def test_a_stage_without_what_its_layers_read_is_refused(
    tmp_path: Path, changes: dict[str, Any], layers: range, words: str
) -> None:
    write_checkpoint(tmp_path, type(CONFIGS["gemma4"])(**CONFIGS["gemma4"].to_dict() | changes), 1)
    model, group = ModelConfig.load(tmp_path), TensorParallelGroup()
    with Checkpoint(tmp_path) as tensors, pytest.raises(ConfigurationError, match=words):
        load_decoder(
            model, WeightLoader(tensors, model.weight_format, group, torch.float32, torch.device("cpu")), 16, layers
        )
