"""Prompts with embeddings of their own through the library: caching, several sequences, beams, adapters, queries.

Run: pytest ci/unit/executor/test_prompts_of_embeddings.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoints import SIZES, TinyCheckpoint, make_checkpoint, make_prompt, make_table

from inflight.config import EngineConfig
from inflight.errors import InvalidRequest
from inflight.executor.front.prompt_adapters import PromptAdapterRequest
from inflight.executor.front.request_output import RequestOutput
from inflight.executor.generation_executor import GenerationExecutor
from inflight.executor.in_process import InProcessExecutor
from inflight.prompt_tuning import EmbeddingTable, PromptTuningConfig
from inflight.sampling_config import SamplingConfig

pytestmark = pytest.mark.slow

GREEDY = SamplingConfig()
NUM_TOKENS = 12
OWN = SIZES["vocab_size"]
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


@pytest.fixture(scope="module")
def service(checkpoint: TinyCheckpoint) -> Iterator[GenerationExecutor]:
    config = EngineConfig(
        gpt_model_path=str(checkpoint.folder),
        device="cpu",
        num_threads=1,
        max_seq_len=100,
        tokens_per_block=BLOCK_SIZE,
        max_batch_size=8,
        max_num_tokens=64,
        max_tokens_in_paged_kv_cache=1024,
    )
    with GenerationExecutor(InProcessExecutor(config)) as service:
        yield service


def tune(table: EmbeddingTable, *extra_ids: int) -> PromptTuningConfig:
    return PromptTuningConfig(embedding_table=table, input_token_extra_ids=list(extra_ids))


def reused_blocks(output: RequestOutput) -> int:
    assert output.request_perf_metrics is not None
    return output.request_perf_metrics.kv_cache_reused_blocks


def test_equal_embeddings_are_cached_and_others_are_not(
    service: GenerationExecutor, checkpoint: TinyCheckpoint
) -> None:
    """The same ids with another table, or with other extra ids, share nothing."""
    table, other = make_table(9, seed=1), make_table(9, seed=2)
    prompt = next(p for p in (make_prompt(22, seed, 9) for seed in count()) if _is_clear(checkpoint, p, table, other))
    cases = [(table, ()), (other, ()), (table, ()), (other, ()), (table, (0,) * 21 + (3,)), (table, (0,) * 21 + (3,))]
    reused = []
    for rows, extra_ids in cases:
        output = service.generate(
            prompt, max_tokens=NUM_TOKENS, sampling_config=GREEDY, prompt_tuning_config=tune(rows, *extra_ids)
        )
        assert output.token_ids == checkpoint.expected(prompt, NUM_TOKENS, rows)
        reused.append(reused_blocks(output))
    assert reused == [0, 0, 5, 5, 0, 5]


def _is_clear(checkpoint: TinyCheckpoint, prompt: list[int], *tables: EmbeddingTable) -> bool:
    try:
        return len({tuple(checkpoint.expected(prompt, NUM_TOKENS, table)) for table in tables}) == len(tables)
    except Exception:  # a near tie
        return False


def test_several_sequences_and_beams_share_one_prompt(service: GenerationExecutor, checkpoint: TinyCheckpoint) -> None:
    table = make_table(9, seed=3)
    prompt, expected = checkpoint.prompt(18, NUM_TOKENS, table)
    sequences = service.generate(
        prompt,
        max_tokens=NUM_TOKENS,
        sampling_config=GREEDY,
        num_return_sequences=3,
        prompt_tuning_config=tune(table),
    )
    assert [output.token_ids for output in sequences.outputs] == [expected] * 3
    beams = service.generate(
        prompt,
        max_tokens=NUM_TOKENS,
        sampling_config=SamplingConfig(beam_width=3),
        num_return_sequences=3,
        prompt_tuning_config=tune(table),
    )
    generated = checkpoint.model.generate(
        inputs_embeds=checkpoint._embed(torch.tensor([prompt]), table),
        max_new_tokens=NUM_TOKENS,
        num_beams=3,
        num_return_sequences=3,
        do_sample=False,
    )
    assert [output.token_ids for output in beams.outputs] == generated.tolist()


def test_a_prompt_of_embeddings_continues_as_its_ids_do(
    service: GenerationExecutor, checkpoint: TinyCheckpoint
) -> None:
    prompt, expected = checkpoint.prompt(15, NUM_TOKENS)
    rows = EmbeddingTable.of(checkpoint.model.get_input_embeddings()(torch.tensor(prompt)).detach())
    first, second = service.generate([rows, rows], max_tokens=NUM_TOKENS, sampling_config=GREEDY)
    assert first.token_ids == second.token_ids == expected
    assert first.prompt_token_ids == list(range(OWN, OWN + 15)) and first.prompt is None


def test_a_query_stands_behind_its_context_which_is_cached(
    service: GenerationExecutor, checkpoint: TinyCheckpoint
) -> None:
    context, queries = make_prompt(24, seed=8), [make_prompt(5, seed) for seed in (1, 2)]
    for place, query in enumerate(queries):
        output = service.generate(
            context, max_tokens=NUM_TOKENS, sampling_config=GREEDY, query_token_ids=query, arrival_time=12.5
        )
        assert output.token_ids == checkpoint.expected(context + query, NUM_TOKENS)
        assert (output.prompt_token_ids, output.arrival_time) == (context + query, 12.5)
        assert reused_blocks(output) == (len(context) // BLOCK_SIZE if place else 0)


def write_adapter(folder: Path, rows: torch.Tensor, peft_type: str = "PROMPT_TUNING") -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": peft_type}))
    save_file({"prompt_embeddings": rows}, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_adapter_stands_before_the_prompt(
    service: GenerationExecutor, checkpoint: TinyCheckpoint, tmp_path: Path, dtype: torch.dtype
) -> None:
    rows = torch.from_numpy(make_table(6, seed=4).rows(torch.arange(6).numpy())).to(dtype)
    folder = write_adapter(tmp_path / "adapter", rows)
    adapter_id = 1 + (dtype == torch.bfloat16)
    named = PromptAdapterRequest("style", adapter_id, str(folder))
    table = EmbeddingTable.of(rows.float().numpy())
    prompt = next(p for p in (make_prompt(7, seed) for seed in count()) if _is_clear(checkpoint, own(6) + p, table))
    for request in (named, PromptAdapterRequest("style", adapter_id)):
        output = service.generate(prompt, max_tokens=NUM_TOKENS, sampling_config=GREEDY, prompt_adapter_request=request)
        assert output.token_ids == checkpoint.expected(own(6) + prompt, NUM_TOKENS, table)
    with pytest.raises(InvalidRequest, match="is that of another adapter"):
        service.generate(
            prompt, max_tokens=1, prompt_adapter_request=PromptAdapterRequest("other", adapter_id, "/elsewhere")
        )


def own(num_rows: int) -> list[int]:
    return list(range(OWN, OWN + num_rows))


def test_what_is_no_prompt_adapter_is_refused(service: GenerationExecutor, tmp_path: Path) -> None:
    prefix = write_adapter(tmp_path / "prefix", torch.zeros(2, 48), "PREFIX_TUNING")
    flat = write_adapter(tmp_path / "flat", torch.zeros(48))
    broken = write_adapter(tmp_path / "broken", torch.zeros(2, 48))
    (broken / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    narrow = write_adapter(tmp_path / "narrow", torch.zeros(2, 47))
    for adapter_id, (folder, sentence) in enumerate(
        [
            (prefix, "peft_type must be PROMPT_TUNING or P_TUNING, got 'PREFIX_TUNING'"),
            (flat, "has no tensor prompt_embeddings of two dimensions"),
            (broken, "cannot be read"),
            (tmp_path / "nowhere", "cannot be read"),
            (narrow, "have 47 features, but those of this model have 48"),
            ("", "was not used before: give its adapter_path"),
        ],
        start=10,
    ):
        with pytest.raises(InvalidRequest, match=sentence):
            service.generate(
                [1, 2], max_tokens=1, prompt_adapter_request=PromptAdapterRequest("a", adapter_id, str(folder))
            )


def test_one_request_brings_embeddings_in_one_way(service: GenerationExecutor) -> None:
    table = make_table(2)
    with pytest.raises(InvalidRequest, match="exclude each other"):
        service.generate(table, max_tokens=1, prompt_tuning_config=tune(table))
