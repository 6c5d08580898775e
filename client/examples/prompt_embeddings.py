"""A prompt of embeddings instead of tokens. Here they are the model's own for some tokens, so the answer is the same.

python client/examples/prompt_embeddings.py [localhost:8001] [CHECKPOINT]
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors import safe_open

from inflight_client import Client

DEFAULT = Path(__file__).parents[2] / "model_repository" / "llm" / "1" / "checkpoint"
TOKENS = [1, 300, 301, 302, 303]

checkpoint = Path(sys.argv[2]) if len(sys.argv) > 2 else DEFAULT
with safe_open(checkpoint / "model.safetensors", "pt") as tensors:
    table = tensors.get_tensor("model.embed_tokens.weight").float()

with Client(*sys.argv[1:2]) as client:
    embedded = client.generate(table[TOKENS].numpy(), max_tokens=16, temperature=0.0)
    spelled = client.generate(TOKENS, max_tokens=16, temperature=0.0)
    print(f"embeddings: {embedded.text!r}\ntokens:     {spelled.text!r}")
