"""Families whose layers keep or compute something else than the default model's, behind `inflight serve`; `make
families` asks all of them.

pytest ci/L0_backend/test_families.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from served_family import serve_and_ask

FAMILIES = {
    "states of sequences beside keys and values, and experts": "Qwen3_5MoeForCausalLM",
    "latents": "DeepseekV3ForCausalLM",
}


@pytest.mark.parametrize("what", FAMILIES)
def test_clients_of_every_api_get_the_tokens_of_transformers(tmp_path: Path, what: str) -> None:
    assert serve_and_ask(tmp_path, FAMILIES[what], 0).complaints == []
