"""Tokens that transformers generated from a network before, kept in `ci/golden/references.json`.

A reference is found by a digest of all that decides it: versions, the network's modules, configuration and weights, the
prompt and what is asked of it. Where anything differs nothing is found, and transformers computes as if nothing were
kept: no reference is stale. The references say nothing about whether tokens depend on rounding: who asks for them keeps
prompts whose tokens do not (`TinyCheckpoint`).

The environment variable INFLIGHT_REFERENCES: `live` computes all and compares them with what is kept; `keep` computes
what is not kept and keeps all that is asked for, which `make references` does; anything else takes what is kept, and
warns where that lacks something.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

VARIABLE = "INFLIGHT_REFERENCES"
KEPT = Path(__file__).resolve().parents[1] / "golden" / "references.json"
NEW = KEPT.parents[2] / "build" / "references"
"""Folder in which each process writes what it computed, until `python -m ci.references` puts it together."""

Tokens = list[int] | None
"""None where a prompt's tokens depend on rounding."""


def generated(network: Any, question: dict[str, Any], compute: Callable[[], Tokens]) -> Tokens:
    """What `compute` returns, from what is kept where that has it. `question`: all that is asked of the network."""
    mode = os.environ.get(VARIABLE, "")
    if has_hooks(network):
        return compute()
    key = digest(network, question)
    tokens = kept()[key] if key in kept() and mode != "live" else compute()
    if mode == "keep":
        NEW.mkdir(parents=True, exist_ok=True)
        with (NEW / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps([key, tokens])}\n")
    elif mode == "live" and key in kept():
        assert kept()[key] == tokens, "transformers generates other tokens than are kept: make references"
    elif key not in kept():
        warnings.warn("transformers computed tokens that are not kept: make references saves the time", stacklevel=2)
    return tokens


def has_hooks(network: torch.nn.Module) -> bool:
    """What its modules do then is not in its digest."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module) for module in network.modules()
    )


def digest(network: Any, question: dict[str, Any]) -> str:
    made = hashlib.blake2b(digest_size=10)
    for part in (
        torch.__version__,
        transformers.__version__,
        platform.machine(),
        repr(network),
        json.dumps(network.config.to_dict(), sort_keys=True, default=str),
        str(network.config._attn_implementation),
        network.generation_config.to_json_string(),
        json.dumps(question, sort_keys=True),
    ):
        made.update(part.encode() + b"\0")
    for name, tensor in network.state_dict().items():
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + b"\0")
        made.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return made.hexdigest()


@cache
def kept() -> dict[str, Tokens]:
    found: dict[str, Tokens] = json.loads(KEPT.read_text(encoding="utf-8"))["tokens"] if KEPT.is_file() else {}
    return found
