"""The program of a rank whose runner is a fake: everything of a real rank but the network.

INFLIGHT_FAKE_FAILURE=SENTENCE    loading fails with it
INFLIGHT_FAKE_CRASH=RANK,STEP     the step of this number raises on that rank
INFLIGHT_FAKE_POISON=TOKEN        a rank that samples for a prompt that begins with this token is killed
"""

from __future__ import annotations

import os
import signal
import sys

from fake_network import VOCAB_SIZE
from fake_runner import FakeRunner, Row

from inflight.config import EngineConfig
from inflight.distributed.rank_group import RankGroup
from inflight.engine_description import EngineDescription
from inflight.errors import ConfigurationError
from inflight.executor.rank.worker import main
from inflight.request_limits import RequestLimits

MAX_SEQ_LEN = 20_000
FAILURE, CRASH, POISON = "INFLIGHT_FAKE_FAILURE", "INFLIGHT_FAKE_CRASH", "INFLIGHT_FAKE_POISON"


class LoadedFakeRunner(FakeRunner):
    """A FakeRunner with the attributes of a loaded runner."""

    def __init__(self, config: EngineConfig, crash_step: int = -1) -> None:
        config = config.for_device("cpu")
        self.num_blocks = 4 * MAX_SEQ_LEN // config.tokens_per_block
        self.windows = (0,)
        self.num_host_blocks = 0
        self.num_snapshots = None
        self.num_host_snapshots = 0
        self.description = EngineDescription(device="cpu")
        self.grammars = None
        self.prompt_blocks = None
        self.adapters = None
        self.adapter_library = None
        self.limits = RequestLimits(
            vocab_size=VOCAB_SIZE,
            max_seq_len=MAX_SEQ_LEN,
            max_input_len=MAX_SEQ_LEN - 1,
            kv_cache_tokens=self.num_blocks * config.tokens_per_block,
            max_batch_size=config.max_batch_size,
        )
        super().__init__(
            num_blocks=self.num_blocks,
            block_size=config.tokens_per_block,
            max_batch_size=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            fail_collect=lambda step: step == crash_step,
            row_error=_die_of_poison,
        )

    def occupy_memory(self) -> None:
        """It has a KV cache of numbers."""


def _die_of_poison(row: Row) -> None:
    if row.token_ids[0] == int(os.environ.get(POISON, "-1")):
        os.kill(os.getpid(), signal.SIGKILL)


def load_fake_runner(config: EngineConfig, group: RankGroup) -> LoadedFakeRunner:
    if sentence := os.environ.get(FAILURE):
        raise ConfigurationError(sentence)
    rank, _, step = os.environ.get(CRASH, "-1,-1").partition(",")
    return LoadedFakeRunner(config, int(step) if int(rank) == group.rank else -1)


if __name__ == "__main__":
    sys.exit(main(load_fake_runner))
