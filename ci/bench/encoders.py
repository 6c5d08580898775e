"""`python -m ci.bench.encoders`: vectors of texts by this engine, and by transformers in padded batches.

A BERT of random weights with the layers of BERT-base, four of its twelve, in float32 on both sides. transformers gets
batches as sentence-transformers makes them: texts sorted by length, 32 at a time, padded to the longest. Rounds
alternate; a ratio is the median of the rounds' own.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertModel

from ci.bench.report import machine, result_path
from inflight.batch_manager.callbacks import Callbacks
from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.executor.rank.assembly import make_manager
from inflight.output_config import AdditionalModelOutput, OutputConfig
from inflight.request import Request
from inflight.result import Result
from inflight.runtime.model_runner import ModelRunner
from inflight.scheduler_output import HIDDEN_STATES

RESULTS = Path(__file__).parent / "results"
NUM_LAYERS, BATCH_SIZE, MAX_TOKENS = 4, 32, 2048
LOADS = {
    "64 texts of 32 tokens": [32] * 64,
    "16 of 128": [128] * 16,
    "4 of 512": [512] * 4,
    "64 of 8 to 512": [8 * 2 ** (place % 7) - place % 5 for place in range(64)],
}


class Engine:
    """One rank's loop in this process."""

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        """`options`: of the EngineConfig."""
        sizes = {"max_batch_size": 64, "max_num_tokens": MAX_TOKENS, "max_seq_len": 512}
        config = EngineConfig(gpt_model_path=folder, device="cpu", **{**sizes, **options}).for_device("cpu")
        self._queue: list[Request] = []
        self._num_left = 0
        callbacks = Callbacks(get_inference_requests=self._take, send_response=self._count)
        self._manager = make_manager(
            config, ModelRunner.load(config, SingleRank()), callbacks, raise_on_step_failure=True
        )

    def _take(self, most: int) -> list[Request]:
        taken, self._queue = self._queue[:most], self._queue[most:]
        return taken

    def _count(self, request_id: int, result: Result | None, is_final: bool, error: Exception | None) -> None:
        if error is not None:
            raise error
        self._num_left -= is_final

    def run(self, texts: list[list[int]]) -> None:
        pooled = OutputConfig(additional_model_outputs=[AdditionalModelOutput(name=HIDDEN_STATES, pooling="mean")])
        self._queue = [
            Request(request_id=number, input_token_ids=text, max_tokens=0, output_config=pooled)
            for number, text in enumerate(texts, 1)
        ]
        self._num_left = len(texts)
        while self._num_left:
            self._manager.step()


def padded(model: BertModel, texts: list[list[int]]) -> None:
    """The means of all texts by transformers."""
    in_order = sorted(texts, key=len)
    for first in range(0, len(in_order), BATCH_SIZE):
        batch = in_order[first : first + BATCH_SIZE]
        longest = max(map(len, batch))
        input_ids = torch.tensor([text + [0] * (longest - len(text)) for text in batch])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in batch])
        states = model(input_ids=input_ids, attention_mask=mask).last_hidden_state
        (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)


def seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the engine's configuration")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    own = {"dtype": "float32", **dict(each.split("=", 1) for each in options.set)}
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=NUM_LAYERS)).eval()
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = Engine(folder, {"num_threads": options.threads, **own})
    rows = []
    for name, lengths in LOADS.items():
        texts = [[draw.randrange(1000, 30000) for _ in range(length)] for length in lengths]
        engine.run(texts)
        padded(model, texts)
        rounds = [
            (seconds(lambda: engine.run(texts)), seconds(lambda: padded(model, texts)))  # noqa: B023 - called at once
            for _ in range(options.rounds)
        ]
        rows.append(
            {
                "load": name,
                "inflight": round(sum(lengths) / median(own for own, _ in rounds)),
                "transformers": round(sum(lengths) / median(other for _, other in rounds)),
                "ratio": round(median(other / own for own, other in rounds), 2),
            }
        )
    table = Table(title="vectors of texts, tokens per second")
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading == "load" else "right")
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()))
    Console(width=100).print(table)
    found = machine()
    path = result_path(options.results, "encoders", found)
    path.write_text(json.dumps({"machine": found, "configuration": own, "cases": rows}, indent=1) + "\n")
    print(f"kept in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
