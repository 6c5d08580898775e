"""Two engines, one of which computes prompts and the other goes on: requests of all kinds give what one engine gives,
however the blocks travel, and nothing of them is left."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import until
from compiled_network import needs_compiler
from msgspec import structs
from request_kinds import ADAPTERS, CHECKPOINT, ENGINE, KINDS, PROMPT, TOKENIZER, RequestKind
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_checkpoint, make_prompt

from inflight.config import EngineConfig
from inflight.context_phase import ContextPhaseParams, RequestType
from inflight.distributed.rank_group import RankGroup
from inflight.errors import InvalidRequest
from inflight.executor.front.request_output import RequestOutput
from inflight.executor.generation_executor import GenerationExecutor
from inflight.executor.in_process import InProcessExecutor
from inflight.executor.rank.assembly import LoadedRunner, load_model_runner
from inflight.executor.rank.leader import contexts
from inflight.output_config import OutputConfig
from inflight.sampling_config import SamplingConfig

pytestmark = pytest.mark.slow

BUFFER = 256
"""Tokens."""
LOG_PROBS = OutputConfig(return_log_probs=True)


@dataclass
class Engine:
    service: GenerationExecutor
    runner: LoadedRunner

    @property
    def num_blocks_kept(self) -> tuple[int, int]:
        """Prompts that wait to be fetched, and that were fetched and not used."""
        blocks = self.runner.prompt_blocks
        assert blocks is not None
        return blocks.num_exported, blocks.num_arrived


def start(**changes: Any) -> Engine:
    usual: dict[str, Any] = {
        "gpt_model_path": str(CHECKPOINT),
        "max_batch_size": 8,
        "max_num_tokens": 128,
        "max_seq_len": 256,
        "max_tokens_in_paged_kv_cache": 1024,
        "tokens_per_block": 4,
        "enable_kv_cache_reuse": False,
        "dtype": "float32",
        "cpu_compile": "false",
        "max_loras": 2,
        "lora_dir": str(ADAPTERS),
        "max_tokens_in_buffer": BUFFER,
        "kv_transfer_timeout_ms": 60_000,
    }
    config = EngineConfig(device="cpu", num_threads=1, **{**usual, **ENGINE, **changes})
    runners: list[LoadedRunner] = []

    def load(config: EngineConfig, group: RankGroup) -> LoadedRunner:
        runners.append(load_model_runner(config, group))
        return runners[0]

    return Engine(GenerationExecutor(InProcessExecutor(config, load), TOKENIZER), runners[0])


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("secret") / "key"
    path.write_bytes(b"k" * 32)
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="module")
def first(key_file: str) -> Iterator[Engine]:
    """For prompts. Others may reach it over the network."""
    engine = start(kv_transfer_interface="lo", kv_transfer_key_file=key_file)
    with engine.service:
        yield engine


@pytest.fixture(scope="module")
def second(key_file: str) -> Iterator[Engine]:
    engine = start(kv_transfer_key_file=key_file)
    with engine.service:
        yield engine
        until(lambda: engine.num_blocks_kept == (0, 0), "nothing is left")


def compute_context(engine: Engine, prompt: list[int] = PROMPT, **options: Any) -> RequestOutput:
    options = {"max_tokens": 9, "sampling_config": SamplingConfig(), "end_ids": [], **options}
    return engine.service.generate_async(prompt, request_type=RequestType.CONTEXT_ONLY, **options).result()


def go_on(
    engine: Engine, params: ContextPhaseParams | None, prompt: list[int] = PROMPT, **options: Any
) -> RequestOutput:
    options = {"max_tokens": 9, "sampling_config": SamplingConfig(), "end_ids": [], **options}
    return engine.service.generate_async(
        prompt, request_type=RequestType.GENERATION_ONLY, context_phase_params=params, **options
    ).result()


def alone(engine: Engine, prompt: list[int] = PROMPT, **options: Any) -> RequestOutput:
    options = {"max_tokens": 9, "sampling_config": SamplingConfig(), "end_ids": [], **options}
    return engine.service.generate_async(prompt, **options).result()


def tokens(output: RequestOutput) -> list[list[int]]:
    return [each.token_ids for each in output.outputs]


def num_cached(output: RequestOutput) -> int:
    assert output.request_perf_metrics is not None
    return output.request_perf_metrics.num_cached_tokens


@pytest.mark.parametrize("kind", KINDS, ids=[kind.feature for kind in KINDS])
def test_each_kind_gives_what_one_engine_gives(first: Engine, second: Engine, kind: RequestKind) -> None:
    wanted = alone(second, kind.prompt, **kind.python())
    if kind.python()["sampling_config"].beam_width > 1:
        with pytest.raises(InvalidRequest, match="beam_width above 1"):
            compute_context(first, kind.prompt, **kind.python())
        return
    context = compute_context(first, kind.prompt, **kind.python())
    assert tokens(context) == [each[:1] for each in tokens(wanted)]
    params = context.context_phase_params
    assert params is not None and params.first_gen_tokens == [each[0] for each in tokens(wanted)]
    found = go_on(second, ContextPhaseParams.deserialize(params.serialize()), kind.prompt, **kind.python())
    assert tokens(found) == tokens(wanted)
    assert [each.finish_reason for each in found.outputs] == [each.finish_reason for each in wanted.outputs]
    for one, other in zip(found.outputs, wanted.outputs, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    is_fetched = "prefix reuse" not in kind.exceptions
    assert num_cached(found) == (len(kind.prompt) + len(kind.fields.get("query_token_ids", [])) - 1) * is_fetched
    until(lambda: first.num_blocks_kept == second.num_blocks_kept == (0, 0), "all were fetched, and used or dropped")


def test_blocks_of_another_machine_come_over_the_network(
    first: Engine, second: Engine, key_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "machine", lambda: "another machine")
    far = start(kv_transfer_key_file=key_file)
    with far.service:
        context = compute_context(first)
        found = go_on(far, context.context_phase_params)
        assert tokens(found) == tokens(alone(second)) and num_cached(found) == len(PROMPT) - 1
        # That one listens for its own machine only.
        context = compute_context(far)
        found = go_on(second, context.context_phase_params)
        assert tokens(found) == tokens(alone(second)) and num_cached(found) == 0
        until(lambda: far.num_blocks_kept[1] == first.num_blocks_kept[0] == 0, "nothing is left")


def test_what_was_fetched_once_is_computed_the_second_time(first: Engine, second: Engine) -> None:
    params = compute_context(first).context_phase_params
    until_fetched = [go_on(second, params) for _ in range(2)]
    assert tokens(until_fetched[0]) == tokens(until_fetched[1]) == tokens(alone(second))
    assert [num_cached(output) for output in until_fetched] == [len(PROMPT) - 1, 0]


def test_prompts_that_nobody_fetches_are_dropped(second: Engine, key_file: str) -> None:
    """The oldest ones for newer ones, and all after a time."""
    engine = start(kv_transfer_key_file=key_file, kv_transfer_timeout_ms=1500, max_tokens_in_buffer=2 * len(PROMPT) + 4)
    with engine.service:
        started = time.monotonic()
        found = [compute_context(engine).context_phase_params for _ in range(4)]
        assert engine.num_blocks_kept[0] <= 2
        output = go_on(second, found[0])
        assert tokens(output) == tokens(alone(second)) and num_cached(output) == 0
        until(lambda: engine.num_blocks_kept == (0, 0), "they are too old")
        assert time.monotonic() - started > 1.5
        output = go_on(second, found[3])
        assert tokens(output) == tokens(alone(second)) and num_cached(output) == 0


def test_the_end_of_the_first_engine_costs_a_prompt_at_most(second: Engine, key_file: str) -> None:
    engine = start(kv_transfer_key_file=key_file)
    with engine.service:
        params = compute_context(engine).context_phase_params
    output = go_on(second, params)
    assert tokens(output) == tokens(alone(second)) and num_cached(output) == 0


def test_a_request_that_is_cancelled_meanwhile_leaves_nothing(first: Engine, second: Engine) -> None:
    options: dict[str, Any] = {"max_tokens": 9, "sampling_config": SamplingConfig(), "end_ids": []}
    for _ in range(5):
        params = compute_context(first).context_phase_params
        result = second.service.generate_async(
            PROMPT, request_type=RequestType.GENERATION_ONLY, context_phase_params=params, **options
        )
        result.abort()
        until(lambda result=result: result.done, "it ends")
    alone(second)
    until(lambda: second.num_blocks_kept == (0, 0), "what came was dropped")


def test_a_context_that_ends_the_output_hands_nothing_over(first: Engine) -> None:
    assert compute_context(first, max_tokens=1).context_phase_params is None
    (token,) = compute_context(first).token_ids
    output = compute_context(first, end_ids=[token])
    assert output.context_phase_params is None and output.finish_reason.wire == "stop"


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_blocks_of_8_bits_travel(kv_cache_dtype: str, key_file: str) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "deterministic": True}
    engines = [start(kv_transfer_key_file=key_file, **options) for _ in range(2)]
    with engines[0].service, engines[1].service:
        wanted = alone(engines[1])
        found = go_on(engines[1], compute_context(engines[0]).context_phase_params)
        assert tokens(found) == tokens(wanted) and num_cached(found) > 0


@needs_compiler
def test_states_of_sequences_travel(key_file: str, tmp_path: Path) -> None:
    """Of one sequence and of several, which all start on what has come; every bit is that of one engine."""
    folder = make_checkpoint(tmp_path, "qwen3_5-wide", dtype=torch.bfloat16).folder
    options = {"gpt_model_path": str(folder), "dtype": "bfloat16", "cpu_compile": "true", "speculative_model_dir": ""}
    options |= {"max_loras": 0, "lora_dir": ""}
    engines = [start(kv_transfer_key_file=key_file, **options) for _ in range(2)]
    with engines[0].service, engines[1].service:
        prompt = make_prompt(27, seed=4)
        for number in (1, 3):
            sampling = SamplingConfig(temperature=0.9, seed=5)
            own = {"num_return_sequences": number, "sampling_config": sampling, "output_config": LOG_PROBS}
            wanted = alone(engines[1], prompt, **own)
            found = go_on(engines[1], compute_context(engines[0], prompt, **own).context_phase_params, prompt, **own)
            assert tokens(found) == tokens(wanted) and num_cached(found) == len(prompt) - 1
            assert [each.log_probs for each in found.outputs] == [each.log_probs for each in wanted.outputs]


def test_blocks_of_windows_travel(key_file: str, tmp_path: Path) -> None:
    """Those that the windows have not passed; an engine that has one table for all layers is refused."""
    folder = make_checkpoint(tmp_path, "gemma3").folder
    options = {"gpt_model_path": str(folder), "max_seq_len": 128, "speculative_model_dir": ""}
    options |= {"max_loras": 0, "lora_dir": ""}
    engines = [start(kv_transfer_key_file=key_file, **options) for _ in range(2)]
    of_one_table = start(
        kv_transfer_key_file=key_file, enable_kv_cache_reuse=True, enable_partial_reuse=True, **options
    )
    with engines[0].service, engines[1].service, of_one_table.service:
        for length in (9, 70):
            prompt = make_prompt(length, seed=4)
            own = {"num_return_sequences": 2, "sampling_config": SamplingConfig(temperature=0.9, seed=5)}
            wanted = alone(engines[1], prompt, **own)
            params = compute_context(engines[0], prompt, **own).context_phase_params
            found = go_on(engines[1], params, prompt, **own)
            assert tokens(found) == tokens(wanted) and num_cached(found) >= length - 1
        with pytest.raises(InvalidRequest, match="give both the same checkpoint"):
            go_on(of_one_table, compute_context(engines[0], prompt, **own).context_phase_params, prompt, **own)


def test_keys_that_another_scale_divides_are_refused(key_file: str, tmp_path: Path) -> None:
    """The checkpoints differ in nothing else, and that in the middle of their file."""
    engines = []
    for name, k_scale in (("one", 0.5), ("other", 0.25)):
        folder = shutil.copytree(CHECKPOINT, tmp_path / name)
        tensors = load_file(folder / "model.safetensors")
        for number in range(json.loads((folder / "config.json").read_text())["num_hidden_layers"]):
            attention = f"model.layers.{number}.self_attn"
            tensors |= {f"{attention}.k_scale": torch.tensor(k_scale), f"{attention}.v_scale": torch.tensor(1.0)}
        save_file(tensors, folder / "model.safetensors")
        engines.append(start(gpt_model_path=str(folder), kv_transfer_key_file=key_file, kv_cache_dtype="fp8"))
    one, other = engines
    with one.service, other.service, pytest.raises(InvalidRequest, match="give both the same checkpoint"):
        go_on(other, compute_context(one).context_phase_params)


def test_params_of_others_are_refused(first: Engine, second: Engine, tmp_path: Path, key_file: str) -> None:
    params = compute_context(first).context_phase_params
    assert params is not None
    with pytest.raises(InvalidRequest, match="another prompt"):
        go_on(second, params, PROMPT[:-1])
    with pytest.raises(InvalidRequest, match="another prompt"):
        go_on(second, params, cache_salt="mine")
    forged = structs.replace(params, opaque_state=params.opaque_state[:-1] + b"?")
    with pytest.raises(InvalidRequest, match="same kv_transfer_key_file"):
        go_on(second, forged)
    with pytest.raises(InvalidRequest, match="belong together"):
        go_on(second, None)
    with pytest.raises(InvalidRequest, match="must be the bytes"):
        ContextPhaseParams.deserialize(b"\xc1")
    other = start(kv_transfer_key_file=key_file, tokens_per_block=8)
    with other.service, pytest.raises(InvalidRequest, match="give both the same checkpoint"):
        go_on(other, params)
    rounded = start(kv_transfer_key_file=key_file, kv_cache_dtype="fp8")
    with rounded.service, pytest.raises(InvalidRequest, match="give both the same checkpoint"):
        go_on(rounded, params)
    whole = start(max_tokens_in_buffer=0)
    with whole.service, pytest.raises(InvalidRequest, match="set its key max_tokens_in_buffer"):
        compute_context(whole)
