"""Greedy tokens of transformers' modelling code with paged attention equal its own, for many classes; and classes that
cannot be served are refused with the reason, before anything is served.

Run: pytest ci/unit/models/test_transformers_decoder.py
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
from model_driver import Driver, Work
from safetensors.torch import load_file, save_file
from tiny_checkpoints import TinyCheckpoint, make_prompt, write_checkpoint
from transformers import PreTrainedConfig, masking_utils
from transformers.models.olmo2 import modeling_olmo2
from transformers_checkpoints import CONFIGS, EXPERTS, GEMMA, GPT2, LONGROPE, make_config

from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.errors import ConfigurationError
from inflight.models import inspection
from inflight.models.checkpoint import SINGLE_FILE
from inflight.models.decoder import Decoder
from inflight.models.transformers_decoder import TransformersDecoder
from inflight.runtime.model_runner import ModelRunner

pytestmark = pytest.mark.slow

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
BLOCK_SIZE = 4
NUM_TOKENS = 16


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Such small networks gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_of(folder: Path, **options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "device": "cpu",
        "max_batch_size": 8,
        "max_num_tokens": 256,
        "max_seq_len": 100,
        "tokens_per_block": BLOCK_SIZE,
        "max_tokens_in_paged_kv_cache": 1024,
        "num_threads": 1,
    }
    return EngineConfig(gpt_model_path=str(folder), **{**defaults, **options})


def load(folder: Path, **options: Any) -> ModelRunner:
    return ModelRunner.load(config_of(folder, **options), SingleRank())


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{folder}").removeprefix("/config.json").removeprefix(": ")


# -- the same tokens ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=list(CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), CONFIGS[request.param], len(request.param))


@pytest.fixture(scope="module")
def runner(checkpoint: TinyCheckpoint, device: str) -> Iterator[ModelRunner]:
    runner = load(checkpoint.folder, device=device, model_impl="transformers")
    assert isinstance(runner._decoder, TransformersDecoder)
    yield runner
    runner.close()


@dataclass(frozen=True)
class Sample:
    """A prompt, and what transformers makes of it."""

    prompt: list[int]
    tokens: list[int]
    log_probs: torch.Tensor

    @classmethod
    def of(cls, checkpoint: TinyCheckpoint, length: int) -> Sample:
        prompt, tokens = checkpoint.prompt(length, NUM_TOKENS)
        with torch.inference_mode():
            logits = checkpoint.model(torch.tensor([prompt + tokens])).logits[0, length - 1 : -1]
        return cls(prompt, tokens, logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0])

    def work(self, **options: Any) -> Work:
        return Work(prompt=self.prompt, max_tokens=NUM_TOKENS, log_probs=True, **options)

    def check(self, work: Work) -> None:
        """The same tokens, and as likely: a network that repeats itself would hide a fault in its tokens alone."""
        assert work.output == self.tokens
        torch.testing.assert_close(torch.tensor(work.output_log_probs), self.log_probs, rtol=1e-3, atol=1e-3)


def run(runner: ModelRunner, samples: list[Sample], works: list[Work]) -> None:
    Driver(runner).run(works)
    for sample, work in zip(samples, works, strict=True):
        sample.check(work)


@pytest.fixture(scope="module")
def samples(checkpoint: TinyCheckpoint) -> list[Sample]:
    """The longer ones are longer than the windows."""
    return [Sample.of(checkpoint, length) for length in (1, 6, 21, 33)]


def test_alone(runner: ModelRunner, samples: list[Sample]) -> None:
    for sample in samples:
        run(runner, [sample], [sample.work()])


def test_in_a_mixed_batch_in_chunks(runner: ModelRunner, samples: list[Sample]) -> None:
    run(runner, samples, [sample.work(chunk=7, arrives=2 * place) for place, sample in enumerate(samples)])


def test_after_a_pause(runner: ModelRunner, samples: list[Sample]) -> None:
    run(runner, samples, [sample.work(pauses_at=5 * (place % 2)) for place, sample in enumerate(samples)])


def test_with_a_shared_prefix(runner: ModelRunner, samples: list[Sample]) -> None:
    sample = samples[2]
    first = Work(prompt=sample.prompt[: 4 * BLOCK_SIZE] + make_prompt(5, seed=1), max_tokens=NUM_TOKENS, log_probs=True)
    second = sample.work(arrives=4, shares=first, shared_blocks=4)
    Driver(runner).run([first, second])
    sample.check(second)


def test_to_the_last_position(runner: ModelRunner, checkpoint: TinyCheckpoint) -> None:
    """The step that overlap has launched beyond the end disturbs nobody, not even where positions are learnt."""
    full, full_tokens = checkpoint.prompt(96, 5)
    other, other_tokens = checkpoint.prompt(9, 12)
    batch = [Work(prompt=full, max_tokens=6), Work(prompt=other, max_tokens=12)]
    Driver(runner).run(batch)
    assert (batch[0].output[:5], batch[1].output) == (full_tokens, other_tokens)


def test_learnt_positions_end_where_the_table_ends(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, make_config("gpt2", **GPT2, max_position_embeddings=32), 1)
    runner = load(tmp_path, max_seq_len=0)
    assert runner.limits.max_seq_len == 32
    prompt, tokens = checkpoint.prompt(28, 5)
    work = Work(prompt=prompt, max_tokens=6)
    Driver(runner).run([work])
    runner.close()
    assert work.output[:5] == tokens


@pytest.mark.parametrize("name", ["llama-llama3", "mistral-window", "qwen2-window", "qwen3-biases"])
def test_a_native_family_gives_the_same_tokens_both_ways(tmp_path: Path, name: str) -> None:
    checkpoint = tiny_checkpoints.make_checkpoint(tmp_path, name)
    samples = [Sample.of(checkpoint, length) for length in (5, 30)]
    for model_impl, kind in (("transformers", TransformersDecoder), ("native", Decoder), ("auto", Decoder)):
        runner = load(tmp_path, model_impl=model_impl)
        assert isinstance(runner._decoder, kind)
        run(runner, samples, [sample.work(chunk=7) for sample in samples])
        runner.close()


def test_both_ways_declare_the_same_caches(tmp_path: Path) -> None:
    tiny_checkpoints.make_checkpoint(tmp_path, "qwen3-window")
    specs = []
    for model_impl in ("native", "transformers"):
        runner = load(tmp_path, model_impl=model_impl)
        specs.append(runner._decoder.cache_specs)
        runner.close()
    assert specs[0] == specs[1]
    assert [spec.sliding_window for spec in specs[0]] == [13, 0, 13]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gemma3_text", "gpt2"])
def test_half_precision(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    checkpoint = write_checkpoint(tmp_path, CONFIGS[name], 1, dtype=dtype)
    runner = load(tmp_path)
    work = Work(prompt=make_prompt(20), max_tokens=6, log_probs=True)
    Driver(runner).run([work])
    runner.close()
    assert {spec.dtype for spec in runner._decoder.cache_specs} == {dtype}
    with torch.inference_mode():
        logits = checkpoint.model.float()(torch.tensor([work.token_ids])).logits[0]
    reference = logits[19:-1].log_softmax(-1).gather(1, torch.tensor(work.output)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(work.output_log_probs), reference, rtol=0, atol=0.3)


def test_two_networks_in_one_process(tmp_path: Path) -> None:
    """Steps of both are under way at once, on a thread each."""
    checkpoints = [write_checkpoint(tmp_path / name, CONFIGS[name], 1) for name in ("gpt2", "phi3")]
    runners = [load(checkpoint.folder) for checkpoint in checkpoints]
    pairs = [checkpoint.prompt(9, NUM_TOKENS) for checkpoint in checkpoints]
    drivers = [Driver(runner) for runner in runners]
    batches = [[Work(prompt=prompt, max_tokens=NUM_TOKENS)] for prompt, _ in pairs]
    for _ in range(NUM_TOKENS + 2):
        for driver, batch in zip(drivers, batches, strict=True):
            driver._step([work for work in batch if work.row < 0], [work for work in batch if not work.is_done])
    assert [batch[0].output for batch in batches] == [tokens for _, tokens in pairs]
    for runner in runners:
        runner.close()


# -- which way, and why ------------------------------------------------------------------------------------------------


def test_the_log_says_which_way_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path / "gpt2", CONFIGS["gpt2"], 1)
    tiny_checkpoints.make_checkpoint(tmp_path / "llama", "llama")
    caplog.set_level(logging.INFO, "inflight")
    load(tmp_path / "gpt2").close()
    load(tmp_path / "llama").close()
    load(tmp_path / "llama", model_impl="transformers").close()
    told = [record.getMessage() for record in caplog.records if "comput" in record.getMessage()]
    assert told[0].startswith("transformers' modelling code computes GPT2LMHeadModel: ")
    assert "no layers of its own for GPT2LMHeadModel" in told[0]
    assert told[1:] == [
        "the engine's own layers compute LlamaForCausalLM",
        "transformers' modelling code computes LlamaForCausalLM: model_impl is transformers",
    ]


def test_a_native_family_with_a_habit_that_is_not_native_goes_the_other_way(tmp_path: Path) -> None:
    config = make_config("llama", hidden_act="gelu")
    checkpoint = write_checkpoint(tmp_path, config, 1)
    prompt, tokens = checkpoint.prompt(9, NUM_TOKENS)
    runner = load(tmp_path)
    assert Driver(runner).run([Work(prompt=prompt, max_tokens=NUM_TOKENS)]) == [tokens]
    runner.close()
    assert refusal(tmp_path, model_impl="native") == (
        f"model_impl is native, but {tmp_path}/config.json: hidden_act 'gelu' is not supported; only silu is; "
        "set model_impl to auto"
    )


def test_native_is_refused_for_another_family(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS["gpt2"], 1)
    sentence = refusal(tmp_path, model_impl="native")
    assert sentence.startswith("model_impl is native, but ") and sentence.endswith("; set model_impl to auto")


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS["gpt2"], 1)
    sentence = refusal(tmp_path, tensor_parallel_size=2)
    assert sentence.startswith("tensor_parallel_size is 2, but transformers' modelling code computes GPT2LMHeadModel")
    assert sentence.endswith("set tensor_parallel_size to 1")


def test_layers_in_cpp_are_for_native_networks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path, CONFIGS["gpt2"], 1, dtype=torch.bfloat16)
    assert refusal(tmp_path, cpu_compile="true") == (
        "cpu_compile is true, but it is for the engine's own layers, not for transformers' modelling code "
        "(key model_impl); set cpu_compile to auto or false"
    )
    caplog.set_level(logging.INFO, "inflight")
    load(tmp_path).close()
    assert any("the layers run in torch" in record.getMessage() for record in caplog.records)


# -- what cannot be served ---------------------------------------------------------------------------------------------

LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "first_k_dense_replace": 3,
}
REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "sinks": (make_config("gpt_oss", **EXPERTS), "its attention has sinks, which the kernels do not compute"),
    "soft cap": (make_config("gemma2", **GEMMA), "its attention caps its scores, which the kernels do not compute"),
    "latent": (make_config("deepseek_v3", **LATENT), "its keys have 24 elements a head and its values 16"),
    "own classes": (make_config("gptj", **GPT2, rotary_dim=8), "do not attend through transformers' attention"),
    "recurrent": (make_config("mamba"), "MambaForCausalLM keeps a recurrent state, for which this engine has no cache"),
    "short convolutions": (
        make_config("lfm2", layer_types=["conv", "full_attention", "conv"], conv_L_cache=3),
        "its layers 0, 2 do not attend through transformers' attention interface",
    ),
    "chunks": (
        make_config(
            "llama4_text",
            num_local_experts=2,
            intermediate_size_mlp=96,
            attention_chunk_size=16,
            attn_temperature_tuning=False,
        ),
        "its attention mask is neither causal nor a sliding window for 100 positions (it may be for fewer: "
        "key max_seq_len)",
    ),
    "positions of its own": (
        make_config("llama4_text", num_local_experts=2, intermediate_size_mlp=96, no_rope_layers=[0, 1, 0]),
        "its attention numbers the tokens of its input itself",
    ),
    "encoder": (make_config("bert"), "its attention is not causal"),
    "two attentions a layer": (make_config("diffllama"), "its layer 0 attends more than once"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(tmp_path: Path, name: str) -> None:
    config, reason = REFUSED[name]
    write_checkpoint(tmp_path, config, 1)
    sentence = refusal(tmp_path)
    assert reason in sentence
    assert config.architectures[0] in sentence


def test_a_chunk_is_no_obstacle_to_shorter_sequences(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, REFUSED["chunks"][0], 1)
    prompt, tokens = checkpoint.prompt(9, 7)
    runner = load(tmp_path, max_seq_len=16)
    assert Driver(runner).run([Work(prompt=prompt, max_tokens=7)]) == [tokens]
    runner.close()


def test_frequencies_that_follow_the_longest_sequence_limit_its_length(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_config("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=40), 1)
    runner = load(tmp_path, max_seq_len=0)
    runner.close()
    assert runner.limits.max_seq_len == 40
    assert refusal(tmp_path, max_seq_len=41) == "max_seq_len 41 is more than the 40 positions that the checkpoint has"


def test_a_network_that_mixes_tokens_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token also sees the one before it in the row, which is another sequence's or none at a chunk's beginning."""
    write_checkpoint(tmp_path, CONFIGS["olmo2"], 1)
    compute = modeling_olmo2.Olmo2MLP.forward
    monkeypatch.setattr(modeling_olmo2.Olmo2MLP, "forward", lambda mlp, x: compute(mlp, x) + x.roll(1, dims=1))
    assert "Olmo2ForCausalLM cannot be served: with paged attention its logits are off by" in refusal(tmp_path)


def test_an_argument_that_the_kernels_do_not_know_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, CONFIGS["olmo2"], 1)
    compute = modeling_olmo2.Olmo2Model.forward
    monkeypatch.setattr(
        modeling_olmo2.Olmo2Model, "forward", lambda model, **arguments: compute(model, **arguments, window_of_day=3)
    )
    assert "its attention takes window_of_day, which the kernels do not compute" in refusal(tmp_path)


def test_what_a_mask_hides() -> None:
    def window_of(mask_function: Any, max_seq_len: int = 50) -> int:
        return inspection._window_of(mask_function, max_seq_len, torch.device("cpu"))

    assert window_of(masking_utils.causal_mask_function) == 50
    assert window_of(masking_utils.sliding_window_causal_mask_function(7)) == 7
    assert window_of(masking_utils.sliding_window_causal_mask_function(70)) == 50
    chunks = masking_utils.chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.int64))
    assert window_of(chunks, 16) == 16
    for max_seq_len in (17, 32, 50, 64):
        with pytest.raises(inspection.Unfit, match="neither causal nor a sliding window"):
            window_of(chunks, max_seq_len)
    with pytest.raises(inspection.Unfit, match="not causal"):
        window_of(masking_utils.bidirectional_mask_function)


def test_a_layers_window_is_that_of_its_mask() -> None:
    asked = inspection._Inspection(max_seq_len=50, windows=[0, 9])
    masks = [torch.full((1, 1, 7, 7), number) for number in (0, 1)]
    assert asked.window_of_layer(0, None, 9) == 9
    assert [asked.window_of_layer(0, mask, None) for mask in masks] == [0, 9]
    assert asked.window_of_layer(0, masks[0], 50) == 0
    for mask, window in ((masks[0], 9), (masks[1], 8), (masks[1], 64)):
        with pytest.raises(inspection.Unfit, match="has a mask with a window of"):
            asked.window_of_layer(0, mask, window)
    with pytest.raises(inspection.Unfit, match="computes attention masks itself"):
        asked.window_of_layer(0, masks[1].float().triu(), None)


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpt2(tmp_path: Path) -> TinyCheckpoint:
    return write_checkpoint(tmp_path, CONFIGS["gpt2"], 1)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)


def change_json(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_experts_in_several_files(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, CONFIGS["mixtral"], 1, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    runner = load(tmp_path)
    sample = Sample.of(checkpoint, 13)
    run(runner, [sample], [sample.work()])
    runner.close()


def test_numbers_that_a_network_cannot_have(gpt2: TinyCheckpoint) -> None:
    change_json(gpt2.folder, n_head=5)
    assert refusal(gpt2.folder).startswith("transformers cannot read it as GPT2LMHeadModel: ")


def test_a_missing_tensor(gpt2: TinyCheckpoint) -> None:
    change_tensors(gpt2.folder, lambda tensors: tensors.pop("transformer.h.1.attn.c_proj.bias"))
    assert refusal(gpt2.folder) == "the checkpoint has no tensor transformer.h.1.attn.c_proj.bias"


def test_a_tensor_too_many(gpt2: TinyCheckpoint) -> None:
    change_tensors(gpt2.folder, lambda tensors: tensors.update({"transformer.h.1.more": torch.zeros(3)}))
    assert refusal(gpt2.folder).endswith("its config.json does not account for: transformer.h.1.more")


def test_what_old_checkpoints_carry_is_no_weight(gpt2: TinyCheckpoint) -> None:
    mask = torch.ones((1, 1, 8, 8), dtype=torch.uint8)
    sample = Sample.of(gpt2, 9)
    change_tensors(gpt2.folder, lambda tensors: tensors.update({"transformer.h.1.attn.bias": mask}))
    runner = load(gpt2.folder)
    run(runner, [sample], [sample.work()])
    runner.close()


def test_a_tensor_of_another_shape(gpt2: TinyCheckpoint) -> None:
    change_tensors(gpt2.folder, lambda tensors: tensors.update({"transformer.ln_f.weight": torch.zeros(3)}))
    assert refusal(gpt2.folder) == (
        "the checkpoint holds transformer.ln_f.weight (shape [3] where config.json asks for [64])"
    )


def test_a_tensor_of_another_kind(gpt2: TinyCheckpoint) -> None:
    weight = torch.zeros(64, dtype=torch.int8)
    change_tensors(gpt2.folder, lambda tensors: tensors.update({"transformer.ln_f.weight": weight}))
    assert "tensor transformer.ln_f.weight is I8; only F32, BF16, F16 weights are supported" in refusal(gpt2.folder)


def test_nothing_points_into_the_files_afterwards(gpt2: TinyCheckpoint) -> None:
    sample = Sample.of(gpt2, 9)
    runner = load(gpt2.folder)
    path = gpt2.folder / SINGLE_FILE
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    run(runner, [sample], [sample.work()])
    runner.close()


def test_pickled_weights_are_refused(gpt2: TinyCheckpoint) -> None:
    (gpt2.folder / SINGLE_FILE).rename(gpt2.folder / "pytorch_model.bin")
    assert "its weights are pickled" in refusal(gpt2.folder)


def test_a_checkpoints_own_code_is_never_run(gpt2: TinyCheckpoint) -> None:
    witness = gpt2.folder / "witness"
    (gpt2.folder / "code.py").write_text(f"open({str(witness)!r}, 'w')\nclass Network: pass\n")
    change_json(gpt2.folder, auto_map={"AutoConfig": "code.Network", "AutoModelForCausalLM": "code.Network"})
    load(gpt2.folder).close()
    change_json(gpt2.folder, model_type="mine", architectures=["MineForCausalLM"])
    refusal(gpt2.folder)
    assert not witness.exists()


@pytest.mark.parametrize("architecture", ["MineForCausalLM", "GPT2ForSequenceClassification"])
def test_a_class_that_is_no_language_model_of_transformers(gpt2: TinyCheckpoint, architecture: str) -> None:
    change_json(gpt2.folder, architectures=[architecture])
    assert refusal(gpt2.folder).startswith(f"{architecture} is not a causal language model of transformers ")


def test_quantized_checkpoints_are_refused(gpt2: TinyCheckpoint) -> None:
    change_json(gpt2.folder, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "quantized checkpoints (gptq) are not supported with transformers' modelling code" in refusal(gpt2.folder)
