"""A network that transformers' code computes behind a real tritonserver: its streams carry what transformers generates.

pytest ci/L0_backend/test_transformers.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from raw_stream import RawStream
from server_process import ServerProcess
from tiny_checkpoints import TinyCheckpoint, write_checkpoint
from transformers_checkpoints import GPT2, make_config

TOKENIZER = Path(__file__).parents[2] / "model_repository" / "llm" / "1" / "checkpoint"
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return write_checkpoint(tmp_path_factory.mktemp("gpt2"), make_config("gpt2", **GPT2, vocab_size=2048), 1)


@pytest.fixture(scope="module")
def transformers_server(checkpoint: TinyCheckpoint) -> Iterator[ServerProcess]:
    parameters = {
        "gpt_model_path": str(checkpoint.folder),
        "model_impl": "transformers",
        "tokenizer_dir": str(TOKENIZER),
        "dtype": "float32",
        "max_batch_size": "8",
        "max_num_tokens": "16",
        "max_tokens_in_paged_kv_cache": "2048",
    }
    with ServerProcess(parameters=parameters) as running:
        yield running


def test_streams_of_a_mixed_batch(transformers_server: ServerProcess, checkpoint: TinyCheckpoint) -> None:
    """Longer prompts than a step takes, beside streams that decode; then all again, on shared prefixes."""
    assert "transformers' modelling code computes GPT2LMHeadModel" in transformers_server.log
    pairs = [checkpoint.prompt(length, NUM_TOKENS) for length in (1, 9, 40, 70)]
    with RawStream(transformers_server.grpc_url) as stream:
        for _ in range(2):
            answers = [
                stream.send({"input_ids": prompt, "max_tokens": NUM_TOKENS, "end_id": -1, "stream": True})
                for prompt, _ in pairs
            ]
            stream.collect(*answers)
            assert [answer.error for answer in answers] == [""] * len(pairs)
            assert [answer.token_ids for answer in answers] == [tokens for _, tokens in pairs]
        prompt, tokens = pairs[0]
        inputs = {"input_ids": prompt, "max_tokens": NUM_TOKENS, "end_id": -1, "stream": True}
        assert stream.ask_in_parts(inputs).token_ids == tokens
