"""Prompts with embeddings of their own through a real server: whole prompts, tables, and what cannot be served.

pytest ci/L0_llm/test_prompt_embeddings.py
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_engine import CHECKPOINT
from server_process import ServerProcess
from transformers import AutoModelForCausalLM, AutoTokenizer

from inflight_client import Client, InvalidRequest

TEXT = "Once upon a time"
NUM_TOKENS = 16
VOCAB_SIZE = 2048
BEAR = "A big bear"
"""Its embeddings, put before the text, make the story one of a bear."""


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.grpc_url, timeout=120) as opened:
        yield opened


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def text_ids() -> list[int]:
    return encode(TEXT)


@pytest.fixture(scope="module")
def table(model: Any) -> Any:
    return embed(model, encode(BEAR)).half().numpy()


def encode(text: str) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(CHECKPOINT)(text)["input_ids"]
    return ids


def embed(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        rows: torch.Tensor = model.get_input_embeddings()(torch.tensor(token_ids))
    return rows


@torch.inference_mode()
def continue_embeddings(model: Any, rows: torch.Tensor) -> tuple[int, ...]:
    """Greedy, by transformers."""
    generated = model.generate(inputs_embeds=rows[None], max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    return tuple(generated[0].tolist())


def test_a_prompt_of_embeddings(client: Client, model: Any, text_ids: list[int]) -> None:
    rows = embed(model, text_ids)
    by_ids = client.generate(text_ids, max_tokens=NUM_TOKENS, end_id=-1)
    answer = client.generate(rows.numpy(), max_tokens=NUM_TOKENS, end_id=-1)
    assert answer.token_ids == by_ids.token_ids == continue_embeddings(model, rows)
    assert answer.num_input_tokens == len(text_ids)


def test_a_table_before_a_text_and_among_ids(client: Client, model: Any, text_ids: list[int], table: Any) -> None:
    own = torch.from_numpy(table).float()
    before = continue_embeddings(model, torch.cat([own, embed(model, text_ids)]))
    for _ in range(2):
        answer = client.generate(TEXT, max_tokens=NUM_TOKENS, end_id=-1, prompt_embedding_table=table)
        assert answer.token_ids == before
    among = [*text_ids, VOCAB_SIZE + 2, text_ids[0], VOCAB_SIZE]
    rows = torch.cat([embed(model, text_ids), own[[2]], embed(model, text_ids[:1]), own[[0]]])
    answer = client.generate(
        among,
        max_tokens=NUM_TOKENS,
        end_id=-1,
        prompt_embedding_table=table,
        prompt_table_extra_ids=[7],
        exclude_input_in_output=False,
    )
    assert answer.token_ids == (*among, *continue_embeddings(model, rows))
    assert answer.text.startswith(TEXT)


def test_what_cannot_be_served_is_refused(client: Client, table: Any) -> None:
    for rows, sentence in (
        (table[:, :255], "have 255 features, but those of this model have 256"),
        (np.full((1, 256), 1e9), "must be finite numbers"),
        (np.zeros((2**17, 256), np.float16), "more than max_prompt_embedding_bytes"),
    ):
        with pytest.raises(InvalidRequest, match=sentence):
            client.generate(TEXT, max_tokens=2, prompt_embedding_table=rows)


def test_the_command_line_sends_a_table(server: ServerProcess, client: Client, table: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "table.npy", table)
    command = [sys.executable, "-m", "inflight_client.cli", "generate", TEXT, "--url", server.grpc_url]
    command += ["--max-tokens", str(NUM_TOKENS), "--prompt-table", str(tmp_path / "table.npy")]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    assert printed.rstrip("\n") == client.generate(TEXT, max_tokens=NUM_TOKENS, prompt_embedding_table=table).text
    assert "bear" in printed and "bear" not in client.generate(TEXT, max_tokens=NUM_TOKENS).text


def test_typical_sampling(client: Client, model: Any, text_ids: list[int]) -> None:
    """So little mass that one token has it: the one whose information is nearest to the expected one."""
    tokens = list(text_ids)
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            log_probs = model(torch.tensor([tokens])).logits[0, -1].log_softmax(0)
        entropy = -(log_probs.exp() * log_probs).nansum()
        tokens.append(int((-log_probs - entropy).abs().argmin()))
    answer = client.generate(text_ids, max_tokens=NUM_TOKENS, end_id=-1, typical_p=1e-6, seed=1)
    assert list(answer.token_ids) == tokens[len(text_ids) :]
