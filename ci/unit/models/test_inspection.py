"""Classes of transformers that paged attention is not for run by their own, or are refused, with the reason.

Run: pytest ci/unit/models/test_inspection.py
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from causal_classes import tiny_config
from model_driver import Driver, Work
from tiny_checkpoints import make_prompt, write_checkpoint
from transformers import PreTrainedConfig, masking_utils
from transformers.models.olmo2 import modeling_olmo2
from transformers_checkpoints import CONFIGS, GPT2, LONGROPE, make_config
from transformers_runner import BLOCK_SIZE, NUM_TOKENS, Sample, load, refusal, run

from inflight.models import inspection
from inflight.models.transformers_sequential import SequentialDecoder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "by name": (make_config("doge"), "its attention is another one for each implementation of it in transformers"),
    "recurrent": (make_config("mamba"), "MambaForCausalLM keeps a recurrent state, for which this engine has no cache"),
    "short convolutions": (
        make_config("lfm2", layer_types=["conv", "full_attention", "conv"], conv_L_cache=3),
        "Lfm2ForCausalLM keeps a recurrent state, for which this engine has no cache",
    ),
    "encoder": (make_config("bert"), "its attention is not causal"),
}
NOT_TOGETHER: dict[str, tuple[PreTrainedConfig, str]] = {
    "own classes": (make_config("gptj", **GPT2, rotary_dim=8), "do not attend through transformers' attention"),
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
    "two attentions a layer": (make_config("diffllama"), "its layer 0 attends more than once"),
    "positions from its cache": (tiny_config("bart"), "its logits are off by"),
}
"""What paged attention is not for, and the class's own is."""


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(tmp_path: Path, name: str) -> None:
    config, reason = REFUSED[name]
    write_checkpoint(tmp_path, config, 1)
    sentence = refusal(tmp_path, model_impl="transformers")
    assert reason in sentence
    assert config.architectures[0] in sentence


@pytest.mark.parametrize("name", list(NOT_TOGETHER))
def test_one_sequence_at_a_time(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    config, reason = NOT_TOGETHER[name]
    checkpoint = write_checkpoint(tmp_path, config, 1)
    samples = [Sample.of(checkpoint, length) for length in (1, 6, 21, 33)]
    with caplog.at_level("WARNING", "inflight"):
        runner = load(tmp_path)
    assert isinstance(runner._computation.decoder, SequentialDecoder)
    assert any("one sequence after the other" in text and reason in text for text in caplog.messages)
    run(runner, samples, [sample.work(chunk=7, arrives=2 * place) for place, sample in enumerate(samples)])
    run(runner, samples, [sample.work(pauses_at=5 * (place % 2)) for place, sample in enumerate(samples)])
    first = Work(prompt=samples[2].prompt[: 4 * BLOCK_SIZE] + make_prompt(5, seed=1), max_tokens=NUM_TOKENS)
    second = samples[2].work(arrives=4, shares=first, shared_blocks=4)
    Driver(runner).run([first, second])
    samples[2].check(second)
    full, full_tokens = checkpoint.prompt(96, 5)
    assert Driver(runner).run([Work(prompt=full, max_tokens=6)])[0][:5] == full_tokens
    runner.close()


def test_kv_caches_of_other_types_are_for_paged_attention(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, NOT_TOGETHER["own classes"][0], 1)
    assert "kv_cache_dtype is float8_e4m3fn, but GPTJForCausalLM computes attention itself" in refusal(
        tmp_path, kv_cache_dtype="fp8"
    )


def test_a_chunk_is_no_obstacle_to_shorter_sequences(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, NOT_TOGETHER["chunks"][0], 1)
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
    assert "Olmo2ForCausalLM cannot be served: with paged attention its logits are off by" in refusal(
        tmp_path, model_impl="transformers"
    )


def test_an_argument_that_the_kernels_do_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, CONFIGS["olmo2"], 1)
    compute = modeling_olmo2.Olmo2Model.forward
    monkeypatch.setattr(
        modeling_olmo2.Olmo2Model, "forward", lambda model, **arguments: compute(model, **arguments, window_of_day=3)
    )
    with caplog.at_level("WARNING", "inflight"):
        load(tmp_path, model_impl="transformers").close()
    assert "its attention takes window_of_day, which the kernels do not compute" in caplog.text


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
