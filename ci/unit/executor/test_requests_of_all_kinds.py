"""Requests that choose tokens in every way and ask for everything, together in one engine: each as it is alone.

Run: pytest ci/unit/executor/test_requests_of_all_kinds.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import SIZES, TinyCheckpoint, make_checkpoint, make_prompt

from inflight.config import EngineConfig, SchedulerPolicy
from inflight.executor.front.generation_result import GenerationResult
from inflight.executor.generation_executor import GenerationExecutor
from inflight.executor.in_process import InProcessExecutor
from inflight.output_config import AdditionalModelOutput, OutputConfig
from inflight.sampling_config import SamplingConfig
from inflight.speculative_decoding import ExternalDraftTokensConfig, NGramDecodingConfig

pytestmark = pytest.mark.slow

HIDDEN = AdditionalModelOutput(name="hidden_states", gather_context=True)
EVERYTHING = OutputConfig(
    return_log_probs=True,
    num_log_probs=5,
    return_prompt_log_probs=True,
    return_context_logits=True,
    return_generation_logits=True,
    additional_model_outputs=[HIDDEN],
)
BIAS = np.sin(np.arange(SIZES["vocab_size"], dtype="<f4")).tobytes()
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling_config": SamplingConfig()},
    "everything": {"sampling_config": SamplingConfig(), "output_config": EVERYTHING},
    "no repeated pair": {
        "sampling_config": SamplingConfig(no_repeat_ngram_size=2, logit_bias={3: 50.0, 4: 50.0, 5: 50.0}),
        "output_config": OutputConfig(return_generation_logits=True),
    },
    "biased": {
        "sampling_config": SamplingConfig(embedding_bias=BIAS, temperature=0.8, seed=4, presence_penalty=0.5),
        "output_config": OutputConfig(num_log_probs=20),
        "streaming": True,
    },
    "decaying": {
        "sampling_config": SamplingConfig(
            temperature=1.2, top_p=0.9, top_p_decay=0.8, top_p_min=0.2, top_p_reset_ids=7, seed=5
        ),
        "output_config": OutputConfig(return_prompt_log_probs=True, return_log_probs=True),
    },
    "hidden": {
        "sampling_config": SamplingConfig(temperature=1.0, seed=2**63, top_k=40),
        "output_config": OutputConfig(additional_model_outputs=[HIDDEN]),
        "streaming": True,
    },
    "beams": {
        "sampling_config": SamplingConfig(beam_width=2, no_repeat_ngram_size=3),
        "output_config": OutputConfig(return_log_probs=True),
        "num_return_sequences": 2,
    },
    "drafts": {
        "sampling_config": SamplingConfig(temperature=0.9, seed=6, frequency_penalty=0.1),
        "ngram_config": NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=1),
        "external_draft_tokens_config": ExternalDraftTokensConfig(tokens=[5, 6, 7]),
        "output_config": EVERYTHING,
    },
    "bad words": {"sampling_config": SamplingConfig(), "bad_words": [[9], [10, 11]], "output_config": EVERYTHING},
}
NUM_TOKENS = 14


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


def serve(checkpoint: TinyCheckpoint, **changes: Any) -> GenerationExecutor:
    config = EngineConfig(
        gpt_model_path=str(checkpoint.folder),
        device="cpu",
        num_threads=1,
        max_seq_len=64,
        tokens_per_block=4,
        **{"max_batch_size": 8, "max_num_tokens": 64, "max_tokens_in_paged_kv_cache": 512, **changes},
    )
    return GenerationExecutor(InProcessExecutor(config))


def prompt_of(kind: str) -> list[int]:
    return make_prompt(8 + len(kind))


@pytest.fixture(scope="module")
def alone(checkpoint: TinyCheckpoint) -> dict[str, GenerationResult]:
    with serve(checkpoint) as service:
        results = {}
        for kind, options in KINDS.items():
            results[kind] = service.generate_async(prompt_of(kind), max_tokens=NUM_TOKENS, **options)
            results[kind].result()
        return results


@pytest.mark.parametrize(
    ("changes", "num_times"),
    [
        ({}, 2),
        ({"max_num_tokens": 9, "max_batch_size": 7}, 1),
        (
            {
                "max_tokens_in_paged_kv_cache": 88,
                "batch_scheduler_policy": SchedulerPolicy.MAX_UTILIZATION,
                "max_num_tokens": 12,
            },
            2,
        ),
        ({"max_batch_size": 2, "enable_kv_cache_reuse": False}, 1),
    ],
    ids=["together", "in chunks", "paused", "in turns"],
)
def test_each_request_is_answered_as_it_is_alone(
    checkpoint: TinyCheckpoint, alone: dict[str, GenerationResult], changes: dict[str, Any], num_times: int
) -> None:
    with serve(checkpoint, **changes) as service:
        results = [
            (kind, service.generate_async(prompt_of(kind), max_tokens=NUM_TOKENS, **options))
            for _ in range(num_times)
            for kind, options in KINDS.items()
        ]
        for kind, result in results:
            assert result.result().token_ids == alone[kind].result().token_ids, kind
            found, wanted = result.tensors(), alone[kind].tensors()
            assert set(found) == set(wanted), kind
            for name, array in wanted.items():
                np.testing.assert_allclose(found[name], array, rtol=0, atol=5e-5, err_msg=f"{kind}: {name}")


def test_scores_are_those_of_transformers(checkpoint: TinyCheckpoint, alone: dict[str, GenerationResult]) -> None:
    """Logits as generate() has them in `logits`, and the numbers that follow from them."""
    prompt = prompt_of("everything")
    generated = checkpoint.model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    result, tensors = alone["everything"].result(), alone["everything"].tensors()
    assert result.token_ids == generated.sequences[0, len(prompt) :].tolist()
    logits = torch.cat(generated.logits)
    close = {"rtol": 0, "atol": 5e-5}
    np.testing.assert_allclose(tensors["generation_logits"], logits.numpy(), **close)
    log_probs = logits.log_softmax(-1)
    np.testing.assert_allclose(result.log_probs, log_probs.amax(1).numpy(), **close)
    top = log_probs.topk(5)
    np.testing.assert_array_equal(tensors["top_token_ids"], top.indices.numpy())
    np.testing.assert_allclose(tensors["top_log_probs"], top.values.numpy(), **close)
    with torch.inference_mode():
        of_prompt = checkpoint.model(torch.tensor([prompt])).logits[0]
    np.testing.assert_allclose(tensors["context_logits"], of_prompt.numpy(), **close)
    expected = of_prompt[:-1].log_softmax(-1).gather(1, torch.tensor(prompt)[1:, None])[:, 0]
    np.testing.assert_allclose(tensors["prompt_log_probs"], expected.numpy(), **close)
    assert tensors["hidden_states"].shape == (NUM_TOKENS, SIZES["hidden_size"])
    assert tensors["context_hidden_states"].shape == (len(prompt), SIZES["hidden_size"])
