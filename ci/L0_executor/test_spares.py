"""Spare ranks: real ones take over with the very tokens, and until then they take neither time nor a KV cache.

pytest ci/L0_executor/test_spares.py
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from calls import until
from mortal_front import MortalFront
from real_engine import CHECKPOINT, IDLE_SHARE, wait_until_idle
from request_kinds import TOKENIZER

from inflight.config import EngineConfig
from inflight.executor.front.generation_result import GenerationResult
from inflight.executor.generation_executor import GenerationExecutor
from inflight.executor.wire.launch import LAUNCH
from inflight.run_directory import RUN_DIRECTORY, run_directory
from inflight.sampling_config import SamplingConfig

pytestmark = pytest.mark.long

WEIGHTS = "memfd:inflight-weights"
PROMPTS = ["Once upon a time", "There were three girls", "The dog", "A"]
KV_TOKENS = 32 * 1024
"""200 MB in float32."""
WAKES = 5
"""A second, of all processes of a spare. One that ticked would wake more often on each of its threads."""


class Engine:
    def __init__(self, num_ranks: int) -> None:
        self.config = EngineConfig(
            gpt_model_path=str(CHECKPOINT),
            device="cpu",
            dtype="float32",
            num_threads=1,
            tensor_parallel_size=num_ranks,
            max_batch_size=8,
            max_tokens_in_paged_kv_cache=KV_TOKENS,
            spare_ranks=1,
            log_level="WARNING",
        )
        self.front = MortalFront(self.config)
        self.service = GenerationExecutor(self.front, TOKENIZER)

    def start(self, max_tokens: int = 200) -> list[GenerationResult]:
        """Greedy and sampled requests of all prompts."""
        return [
            self.service.generate_async(prompt, max_tokens=max_tokens, streaming=True, sampling_config=sampling)
            for prompt in PROMPTS
            for sampling in (SamplingConfig(), SamplingConfig(temperature=1.0, seed=5))
        ]

    def wait_for_spare(self) -> list[int]:
        """Its processes."""
        until(lambda: self.front.num_spares() == 1, "a spare is loaded")
        return sorted(set(engine_processes()) - set(self.front.engine_pids()))


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="run-") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_DIRECTORY, directory)
        engine = Engine(request.param)
        yield engine
        engine.service.shutdown()
        assert engine_processes() == []
        assert not any(WEIGHTS in os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())


def test_a_spare_sleeps_without_a_kv_cache_until_it_takes_over(engine: Engine) -> None:
    spare = engine.wait_for_spare()
    serving = [pid for pid in engine.front.engine_pids() if is_rank(pid)]
    ranks = [pid for pid in spare if is_rank(pid)]
    wait_until_idle(spare, WAKES, IDLE_SHARE)
    cache_bytes = kv_cache_bytes(engine)
    assert max(map(resident_bytes, ranks)) < min(map(resident_bytes, serving)) - cache_bytes / 2
    # Each rank's weights are the same memory, which none can write to, as those of the one that serves.
    assert {inode for pid in ranks for inode in shared_weights(pid)} == {
        inode for pid in serving for inode in shared_weights(pid)
    }
    assert all(len(shared_weights(pid)) == 1 for pid in [*ranks, *serving])
    before = [resident_bytes(pid) for pid in ranks]
    alone = [result.result() for result in engine.start()]
    running = engine.start()
    os.kill(serving[-1], signal.SIGKILL)
    for result, expected in zip(running, alone, strict=True):
        assert [each.token_ids for each in result.result().outputs] == [each.token_ids for each in expected.outputs]
    assert set(ranks) <= set(engine.front.engine_pids()), "the spare has taken over"
    until(
        lambda: all(resident_bytes(pid) > size + cache_bytes / 2 for pid, size in zip(ranks, before, strict=True)),
        "it has one",
    )
    engine.wait_for_spare()


def engine_processes() -> list[int]:
    """Of all launches of this test's engines."""
    mark = f"{LAUNCH}=".encode()
    here = str(run_directory()).encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(each.startswith(mark) and here in each for each in variables):
            found.append(int(folder.name))
    return found


def is_rank(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False
    return b"inflight.worker" in command and b"mpiexec" not in command


def shared_weights(pid: int) -> set[str]:
    """Inode numbers of the weights that a process maps, all of them to read only."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if WEIGHTS in line]
    assert all(protection == "r--s" for _, protection, *_ in lines)
    return {inode for _, _, _, _, inode, *_ in lines}


def resident_bytes(pid: int) -> int:
    """Without pages of files, which the system drops when others need memory."""
    (line,) = [each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def kv_cache_bytes(engine: Engine) -> int:
    """Of one rank. Two tensors of each layer."""
    model = json.loads((CHECKPOINT / "config.json").read_text())
    head_dim = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    heads = model["num_key_value_heads"] // engine.config.tensor_parallel_size
    return int(2 * 4 * model["num_hidden_layers"] * heads * head_dim * KV_TOKENS)
