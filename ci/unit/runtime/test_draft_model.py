"""A draft model changes no token: the same requests on real networks, with one and without.

The twin is a draft model with the network's own weights, whose drafts are all right if it has computed what it should;
the stranger has other weights, and its drafts are nearly all wrong.

Run: pytest ci/unit/runtime/test_draft_model.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers_checkpoints
from compiled_network import needs_compiler
from msgspec import structs
from network_engine import MAX_SEQ_LEN, Engine
from rank_processes import PipeGroup, run_on_two_ranks
from tiny_checkpoints import CONFIGS, make_checkpoint, make_prompt, make_table, write_checkpoint

from inflight.config import EngineConfig, SchedulerPolicy
from inflight.distributed.rank_group import SingleRank
from inflight.errors import ConfigurationError, InvalidRequest
from inflight.models import checkpoint as checkpoints
from inflight.models.compiled import CompiledNetwork
from inflight.output_config import OutputConfig
from inflight.prompt_tuning import PromptTuningConfig
from inflight.request import Request
from inflight.result import PerfMetrics, join_tensors
from inflight.runtime import step_sizes
from inflight.runtime.model_runner import ModelRunner
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import DRAFTED, NewSequence, RowWork, SchedulerOutput
from inflight.speculative_decoding import DraftTargetDecodingConfig, ExternalDraftTokensConfig, NGramDecodingConfig

pytestmark = pytest.mark.slow

TARGET, STRANGER = "qwen3", "llama-tied"
RANDOM = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 5}
PENALISED = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
OFF = DraftTargetDecodingConfig(max_draft_len=0)


def make_request(number: int, prompt: list[int], max_tokens: int, **options: Any) -> Request:
    sampling = SamplingConfig(**options.pop("sampling", {}))
    return Request(
        request_id=number, input_token_ids=prompt, max_tokens=max_tokens, sampling_config=sampling, **options
    )


REQUESTS = [
    make_request(1, make_prompt(9, seed=1), 40),
    make_request(2, make_prompt(21, seed=2), 30, sampling=RANDOM),
    make_request(3, make_prompt(13, seed=4), 30, sampling={"no_repeat_ngram_size": 2}, bad_words=[[5], [9, 12]]),
    make_request(4, make_prompt(11, seed=5), 30, end_ids=list(range(0, 203, 5)), sampling={"min_tokens": 9}),
    make_request(5, make_prompt(15, seed=11), 40, sampling={**RANDOM, **PENALISED, "typical_p": 0.9}),
    make_request(6, make_prompt(6, seed=12), 40, sampling={**PENALISED, "logit_bias": {3: 30.0, 7: 30.0}}),
    make_request(7, make_prompt(17, seed=7), 20, output_config=OutputConfig(return_generation_logits=True)),
    make_request(8, make_prompt(33, seed=8), 20, sampling=RANDOM, num_return_sequences=3, streaming=True),
    make_request(9, make_prompt(8, seed=8) * 3, 30, ngram_config=NGramDecodingConfig()),
    make_request(10, make_prompt(9, seed=1), 30, external_draft_tokens_config=ExternalDraftTokensConfig(tokens=[1, 2])),
    make_request(11, make_prompt(12, seed=3), 12, sampling={"beam_width": 2}),
    make_request(12, make_prompt(14, seed=6), 20, sampling={**RANDOM, "top_p_decay": 0.9, "top_p_min": 0.1}),
    make_request(13, make_prompt(10, seed=3, num_own=5), 20),
]
REQUESTS[-1] = structs.replace(REQUESTS[-1], prompt_tuning_config=PromptTuningConfig(embedding_table=make_table(5)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), TARGET).folder


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("stranger"), STRANGER).folder


def make_engine(folder: Path, draft: Path | None, **options: Any) -> Engine:
    usual = {
        "policy": SchedulerPolicy.GUARANTEED_NO_EVICT,
        "num_blocks": 200,
        "max_num_tokens": 48,
        "max_batch_size": 32,
        "num_threads": 1,
        "speculative_model_dir": str(draft or ""),
    }
    return Engine(folder, **{**usual, **options})


Tokens = dict[tuple[int, int], list[int]]


def serve(folder: Path, draft: Path | None, requests: list[Request], **options: Any) -> Tokens:
    engine = make_engine(folder, draft, **options)
    engine.serve(requests)
    engine.runner.close()
    assert engine.kv_cache.num_free_blocks == engine.kv_cache.num_blocks
    return {key: engine.tokens(*key) for key in engine.results}


def metrics_of(engine: Engine, number: int) -> PerfMetrics:
    found = [each.request_perf_metrics for (key, _), all_ in engine.results.items() if key == number for each in all_]
    return next(metrics for metrics in found if metrics is not None)


def served_alone(folder: Path, requests: list[Request]) -> Tokens:
    """Each request alone, without a draft model."""
    engine = make_engine(folder, None, enable_reuse=False)
    for request in requests:
        engine.serve([request])
    engine.runner.close()
    return {key: engine.tokens(*key) for key in engine.results}


@pytest.fixture(scope="module")
def plain(folder: Path) -> Tokens:
    return served_alone(folder, REQUESTS)


@pytest.mark.parametrize("draft", ["twin", "stranger"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_tokens": 32},
        {"num_blocks": 56, "max_batch_size": 22, "policy": SchedulerPolicy.MAX_UTILIZATION},
        {"speculative_max_draft_len": 9},
    ],
    ids=["together", "in chunks", "in short memory", "many drafts"],
)
def test_tokens_are_those_without(
    folder: Path, stranger: Path, plain: Tokens, draft: str, options: dict[str, Any]
) -> None:
    assert serve(folder, folder if draft == "twin" else stranger, REQUESTS, **options) == plain


def test_some_requests_have_it_and_others_do_not(folder: Path, plain: Tokens) -> None:
    requests = [
        structs.replace(request, draft_target_config=OFF) if number % 3 else request
        for number, request in enumerate(REQUESTS)
    ]
    assert serve(folder, folder, requests) == plain


def test_padded_as_on_a_gpu(folder: Path, plain: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_sizes, "PADDED_DEVICES", {"cpu"})
    requests = [
        structs.replace(request, draft_target_config=DraftTargetDecodingConfig(max_draft_len=1 + 2 * (number % 3)))
        for number, request in enumerate(REQUESTS)
    ]
    assert serve(folder, folder, requests) == plain


def test_generation_logits_are_those_of_the_network(folder: Path, stranger: Path) -> None:
    """Of every token one row, also where drafts were rejected."""
    found = []
    for draft in (None, folder, stranger):
        engine = make_engine(folder, draft)
        engine.serve([REQUESTS[6]])
        engine.runner.close()
        found.append(torch.from_numpy(join_tensors(engine.results[7, 0])["generation_logits"]))
    for logits in found[1:]:
        torch.testing.assert_close(logits, found[0], atol=1e-4, rtol=0)


# -- what the draft model has computed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 8])
def test_all_drafts_of_the_twin_are_accepted(folder: Path, plain: Tokens, number: int) -> None:
    """Greedy, random, and where several sequences continue one prompt."""
    engine = make_engine(folder, folder)
    engine.serve([REQUESTS[number - 1]])
    engine.runner.close()
    metrics = metrics_of(engine, number)
    assert metrics.total_draft_tokens == metrics.total_accepted_draft_tokens > 20
    assert engine.tokens(number) == plain[number, 0]


def test_a_stranger_is_asked_no_more_for_a_while(folder: Path, stranger: Path) -> None:
    engine = make_engine(folder, stranger)
    engine.serve([REQUESTS[0]])
    engine.runner.close()
    metrics = metrics_of(engine, 1)
    assert metrics.total_accepted_draft_tokens < 4 and 0 < metrics.total_draft_tokens < 20


def accepted_late(folder: Path, **options: Any) -> None:
    """Two requests fill a batch of two, without a place for drafts, until the shorter one ends."""
    engine = make_engine(folder, folder, max_batch_size=2, max_num_tokens=64, **options)
    engine.serve([make_request(1, make_prompt(9, seed=1), 50), make_request(2, make_prompt(7, seed=3), 20)])
    engine.runner.close()
    metrics = metrics_of(engine, 1)
    assert metrics.total_draft_tokens == metrics.total_accepted_draft_tokens > 8


def test_it_catches_up_with_tokens_that_were_decoded_without_it(folder: Path) -> None:
    accepted_late(folder)


def test_it_catches_up_in_a_padded_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_sizes, "PADDED_DEVICES", {"cpu"})
    accepted_late(folder)


def test_cached_prefixes_are_cached_for_it_too(folder: Path) -> None:
    engine = make_engine(folder, folder)
    prompt = make_prompt(29, seed=4)
    engine.serve([make_request(1, prompt, 1)])
    engine.serve([make_request(2, prompt, 30)])
    engine.runner.close()
    metrics = metrics_of(engine, 2)
    assert metrics.kv_cache_reused_blocks == 7
    assert metrics.total_draft_tokens == metrics.total_accepted_draft_tokens > 20


def test_cold_blocks_hold_its_keys_and_values_too(folder: Path) -> None:
    engine = make_engine(
        folder, folder, num_blocks=16, max_num_tokens=64, kv_cache_host_memory_bytes=2**22, kv_cache={}
    )
    prompt = make_prompt(29, seed=4)
    engine.serve([make_request(1, prompt, 1)])
    engine.serve([make_request(2, make_prompt(40, seed=5), 20)])
    layers = engine.runner._store.states
    before = [layer["keys"].clone() for layer in layers]
    engine.serve([make_request(3, prompt, 30)])
    engine.runner.close()
    metrics = metrics_of(engine, 3)
    assert metrics.kv_cache_reused_blocks == 7 and not torch.equal(before[-1], layers[-1]["keys"])
    assert metrics.total_draft_tokens == metrics.total_accepted_draft_tokens > 20


# -- states of sequences -----------------------------------------------------------------------------------------------


RECURRENT = "qwen3_5"
OF_TEXT = [request for request in REQUESTS if request.prompt_tuning_config is None]


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("recurrent"), RECURRENT).folder


@pytest.fixture(scope="module")
def plain_recurrent(recurrent: Path) -> Tokens:
    return served_alone(recurrent, OF_TEXT)


@pytest.mark.parametrize("draft", ["twin", "stranger", "other way round"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_tokens": 32, "num_state_snapshots": 12},
        {"num_blocks": 56, "max_batch_size": 22, "policy": SchedulerPolicy.MAX_UTILIZATION},
        {"num_blocks": 56, "kv_cache_host_memory_bytes": 2**24},
    ],
    ids=["together", "in chunks", "in short memory", "from host memory"],
)
def test_states_change_no_token(
    folder: Path, recurrent: Path, plain: Tokens, plain_recurrent: Tokens, draft: str, options: dict[str, Any]
) -> None:
    """Of the network and its draft model, of the network alone, of the draft model alone."""
    if draft == "other way round":
        expected = {key: tokens for key, tokens in plain.items() if key in plain_recurrent}
        assert serve(folder, recurrent, OF_TEXT, **options) == expected
    else:
        assert serve(recurrent, recurrent if draft == "twin" else folder, OF_TEXT, **options) == plain_recurrent


@pytest.mark.parametrize("pads", [False, True], ids=["", "padded as on a GPU"])
@pytest.mark.parametrize("number", [1, 2, 8])
def test_all_drafts_of_a_recurrent_twin_are_accepted(
    recurrent: Path, plain_recurrent: Tokens, number: int, pads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pads:
        monkeypatch.setattr(step_sizes, "PADDED_DEVICES", {"cpu"})
    engine = make_engine(recurrent, recurrent)
    engine.serve([REQUESTS[number - 1]])
    engine.runner.close()
    metrics = metrics_of(engine, number)
    assert metrics.total_draft_tokens == metrics.total_accepted_draft_tokens > 20
    assert engine.tokens(number) == plain_recurrent[number, 0]


def test_a_recurrent_draft_model_catches_up(recurrent: Path) -> None:
    accepted_late(recurrent)


def test_states_behind_cached_prefixes_are_kept_for_it_too(recurrent: Path) -> None:
    """Behind a prompt and behind an answer, whose last states were kept in steps that verified drafts."""
    engine = make_engine(recurrent, recurrent)
    prompt = make_prompt(29, seed=4)
    engine.serve([make_request(1, prompt, 17)])
    engine.serve([make_request(2, prompt, 20)])
    engine.serve([make_request(3, [*prompt, *engine.tokens(1), 5], 14)])
    engine.runner.close()
    for number, num_reused in ((2, 7), (3, 11)):
        metrics = metrics_of(engine, number)
        assert metrics.kv_cache_reused_blocks == num_reused
        assert metrics.total_draft_tokens == metrics.total_accepted_draft_tokens > 7


def test_wrong_drafts_of_others_leave_it_what_it_knows(recurrent: Path, plain_recurrent: Tokens) -> None:
    """A row goes on from the state behind the last accepted draft, which the draft model has not computed."""
    engine = make_engine(recurrent, recurrent)
    tokens = plain_recurrent[1, 0]
    given = ExternalDraftTokensConfig(tokens=[*tokens[:3], (tokens[3] + 1) % 203, 7, 8])
    engine.serve([structs.replace(REQUESTS[0], external_draft_tokens_config=given)])
    engine.runner.close()
    metrics = metrics_of(engine, 1)
    assert engine.tokens(1) == tokens
    assert metrics.total_draft_tokens - metrics.total_accepted_draft_tokens == 3
    assert metrics.total_accepted_draft_tokens > 20


# -- windows -----------------------------------------------------------------------------------------------------------


WINDOWED = "gemma3"


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("windowed"), WINDOWED).folder


@pytest.fixture(scope="module")
def plain_windowed(windowed: Path) -> Tokens:
    return served_alone(windowed, OF_TEXT)


@pytest.mark.parametrize("draft", ["twin", "stranger"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 60, "max_batch_size": 22, "max_num_tokens": 24, "policy": SchedulerPolicy.MAX_UTILIZATION},
        {"num_blocks": 60, "kv_cache_host_memory_bytes": 2**24},
    ],
    ids=["together", "in short memory", "from host memory"],
)
def test_blocks_that_are_given_back_change_no_token(
    folder: Path, windowed: Path, plain_windowed: Tokens, draft: str, options: dict[str, Any]
) -> None:
    """With a draft model that has the network's windows, and with one that sees all tokens."""
    engine = make_engine(windowed, windowed if draft == "twin" else folder, **options)
    assert len(engine.runner.windows) > 1
    engine.serve(OF_TEXT)
    engine.runner.close()
    assert {key: engine.tokens(*key) for key in engine.results} == plain_windowed
    assert engine.kv_cache.num_free_blocks == engine.kv_cache.num_blocks


@pytest.mark.parametrize("number", [1, 2, 8])
def test_all_drafts_of_a_twin_with_windows_are_accepted(windowed: Path, plain_windowed: Tokens, number: int) -> None:
    engine = make_engine(windowed, windowed)
    engine.serve([REQUESTS[number - 1]])
    engine.runner.close()
    metrics = metrics_of(engine, number)
    assert metrics.total_draft_tokens == metrics.total_accepted_draft_tokens > 20
    assert engine.tokens(number) == plain_windowed[number, 0]


def test_what_it_catches_up_with_is_stored_in_blocks_of_its_row_alone(windowed: Path) -> None:
    """As many tokens as its windows have passed."""
    engine = make_engine(windowed, windowed, max_batch_size=2, max_num_tokens=64)
    engine.serve([make_request(1, make_prompt(9, seed=1), 50), make_request(2, make_prompt(7, seed=3), 30)])
    engine.runner.close()
    assert metrics_of(engine, 1).total_accepted_draft_tokens > 2
    store = engine.runner._store
    assert not any(tensor[store.filler_block].any() for tensor in store.block_tensors)


def test_logits_that_are_not_finite_only_make_bad_drafts(
    folder: Path, tmp_path: Path, plain: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come of weights here that are refused otherwise, in place of sums that overflow."""
    monkeypatch.setattr(checkpoints, "why_unusable", lambda values, dtype: "")
    checkpoint = write_checkpoint(tmp_path, CONFIGS["mistral"], 3)
    with torch.no_grad():
        checkpoint.model.lm_head.weight.fill_(float("nan"))
        checkpoint.model.model.layers[0].mlp.down_proj.weight.fill_(float("inf"))
    checkpoint.model.save_pretrained(tmp_path)
    assert serve(folder, tmp_path, REQUESTS) == plain


# -- networks and ranks ------------------------------------------------------------------------------------------------


def test_a_draft_model_of_transformers_code(folder: Path, tmp_path: Path, plain: Tokens) -> None:
    config = transformers_checkpoints.CONFIGS["apertus"]
    assert config.vocab_size == CONFIGS[TARGET].vocab_size
    assert serve(folder, write_checkpoint(tmp_path, config, 4).folder, REQUESTS[:5]) == {
        key: tokens for key, tokens in plain.items() if key[0] <= 5
    }


@needs_compiler
@pytest.mark.parametrize("draft", ["twin", "stranger"])
@pytest.mark.parametrize(("name", "stranger_name"), [("llama-wide", "qwen3-wide"), ("qwen3_5-wide", "lfm2-wide")])
def test_compiled_layers(tmp_path: Path, name: str, stranger_name: str, draft: str) -> None:
    target = make_checkpoint(tmp_path / "target", name, torch.bfloat16).folder
    other = make_checkpoint(tmp_path / "other", stranger_name, torch.bfloat16).folder
    requests = REQUESTS[:6]
    options = {"cpu_compile": "true", "max_num_tokens": 64}
    expected = serve(target, None, requests, **options)
    engine = make_engine(target, target if draft == "twin" else other, **options)
    assert engine.runner._computation.draft_model is not None
    assert isinstance(engine.runner._computation.draft_model._network, CompiledNetwork)
    engine.serve(requests)
    engine.runner.close()
    assert {key: engine.tokens(*key) for key in engine.results} == expected
    metrics = metrics_of(engine, 1)
    # A token that it catches up with is computed among several: in bfloat16 that is another token now and then.
    assert metrics.total_draft_tokens and (metrics.acceptance_rate > 0.5) == (draft == "twin")


def on_two_ranks(group: PipeGroup, folder: Path, draft: Path) -> tuple[Tokens, int]:
    engine = make_engine(folder, draft, rank_group=group, tensor_parallel_size=2)
    engine.serve(REQUESTS[:6])
    group.barrier()
    engine.runner.close()
    accepted = sum(metrics_of(engine, request.request_id).total_accepted_draft_tokens for request in REQUESTS[:6])
    return {key: engine.tokens(*key) for key in engine.results}, accepted


def test_on_two_ranks(folder: Path, plain: Tokens) -> None:
    (tokens, accepted), other = run_on_two_ranks(on_two_ranks, folder, folder)
    assert (tokens, accepted) == other and accepted > 30
    assert tokens == {key: plain[key] for key in tokens}


# -- what is refused ---------------------------------------------------------------------------------------------------


def load(folder: Path, **options: Any) -> ModelRunner:
    config = EngineConfig(
        gpt_model_path=str(folder), device="cpu", max_tokens_in_paged_kv_cache=512, cpu_compile="false", **options
    )
    return ModelRunner.load(config, SingleRank())


def other_vocabulary(folder: Path) -> Path:
    return write_checkpoint(folder, _changed(CONFIGS[TARGET], vocab_size=64), 1).folder


def fewer_positions(folder: Path) -> Path:
    return write_checkpoint(folder, _changed(CONFIGS[TARGET], max_position_embeddings=32), 1).folder


def nothing(folder: Path) -> Path:
    return folder / "nothing"


def _changed(config: Any, **changes: Any) -> Any:
    return type(config)(**{**config.to_dict(), **changes})


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (other_vocabulary, "its vocabulary has 64 tokens, that of gpt_model_path has 203; drafts are token ids, so"),
        (fewer_positions, "it has 32 positions, but max_seq_len is 64; set max_seq_len to at most 32 or"),
        (nothing, "config.json"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(
    folder: Path, tmp_path: Path, draft: Callable[[Path], Path], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^speculative_model_dir: .*{words}"):
        load(folder, max_seq_len=MAX_SEQ_LEN, speculative_model_dir=str(draft(tmp_path)))


def test_drafts_of_a_draft_model_that_is_not_there_are_refused(folder: Path) -> None:
    runner = load(folder, max_seq_len=MAX_SEQ_LEN)
    request = structs.replace(REQUESTS[0], draft_target_config=DraftTargetDecodingConfig())
    with pytest.raises(InvalidRequest, match="speculative_max_draft_len needs a draft model"):
        runner.limits.validate(request)
    runner.limits.validate(structs.replace(request, draft_target_config=OFF))
    new = NewSequence(
        row=0, token_ids=[1, 2], num_prompt_tokens=2, block_ids=[0], sampling_config=request.sampling_config
    )
    work = RowWork(row=0, start=2, num_tokens=2, token_ids=[DRAFTED], num_sampled=2)
    with pytest.raises(ValueError, match="there is no draft model, but row 0 asks for drafts of it"):
        runner.forward(SchedulerOutput(new_sequences=[new], rows=[work]))
    runner.close()
