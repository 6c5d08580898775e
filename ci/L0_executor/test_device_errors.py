"""A device that fails in a step: its rank ends and is relaunched, and every stream goes on with the same tokens.

pytest ci/L0_executor/test_device_errors.py
"""

from __future__ import annotations

from pathlib import Path

import faulty_rank
import pytest
from real_engine import CHECKPOINT
from request_kinds import TOKENIZER

from inflight import backoff
from inflight.config import EngineConfig
from inflight.executor.front.generation_result import GenerationResult
from inflight.executor.front.remote import RemoteFront
from inflight.executor.generation_executor import GenerationExecutor
from inflight.executor.launchers.processes import ProcessLauncher
from inflight.executor.launchers.uniproc import UniProc
from inflight.sampling_config import SamplingConfig

PROMPTS = ["Once upon a time", "The dog", "A"]
FAULTS = ["launch,15", "wait,15", "memory,15"]


def test_a_device_that_fails_ends_its_rank_and_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same streams meet three faults, one in each launch, and go on with the ranks of the fourth."""
    monkeypatch.setattr(backoff, "LONGEST", 0.0)
    faults = tmp_path / "faults"
    faults.write_text("\n".join(FAULTS))
    monkeypatch.setenv(faulty_rank.FAULTS, str(faults))
    config = EngineConfig(
        gpt_model_path=str(CHECKPOINT),
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_batch_size=8,
        max_tokens_in_paged_kv_cache=4096,
        log_level="ERROR",
    )
    front = RemoteFront(config, ProcessLauncher(config, UniProc([faulty_rank.__file__])))
    with GenerationExecutor(front, TOKENIZER) as service:

        def start() -> list[GenerationResult]:
            return [
                service.generate_async(prompt, max_tokens=100, streaming=True, sampling_config=sampling)
                for prompt in PROMPTS
                for sampling in (SamplingConfig(), SamplingConfig(temperature=1.0, seed=5))
            ]

        first = set(front.engine_pids())
        disturbed = [result.result().token_ids for result in start()]
        assert not faults.read_text().strip() and front.num_losses() >= len(FAULTS)
        assert first and not first & set(front.engine_pids())
        assert disturbed == [result.result().token_ids for result in start()]
