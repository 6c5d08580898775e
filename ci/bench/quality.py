"""`python -m ci.bench.quality`: what types and quantisation cost of a network's quality.

Of each, the perplexity of texts that the default model was not trained on, and the share of their tokens after which
the likeliest next token is that of float32. With --checkpoint of another model, texts are read from --texts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ci.bench.report import machine
from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.layers.attention import AttentionMetadata
from inflight.runtime.loading import LoadedEngine, load_engine
from inflight.text.tokenizer import Tokenizer
from inflight_kernels.kv_cache.step_blocks import StepBlocks

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_MODEL = ROOT / "model_repository" / "llm" / "1" / "checkpoint"
HELD_OUT_SEED = 2020
"""Of texts; training has others."""
TYPES = ("float32", "bfloat16")
OPTIONS: dict[str, dict[str, str]] = {
    "": {},
    " KV fp8": {"kv_cache_dtype": "fp8"},
    " KV int8": {"kv_cache_dtype": "int8"},
    "+int8": {"quantization": "int8"},
    "+fp8": {"quantization": "fp8"},
    "+int4": {"quantization": "int4"},
    "+int8+int8": {"quantization": "int8", "cpu_activations": "int8"},
    "+int4+int8": {"quantization": "int4", "cpu_activations": "int8"},
}
"""By what is written behind the type."""
MAX_TOKENS = 1024
BLOCK_SIZE = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=DEFAULT_MODEL)
    parser.add_argument(
        "--texts", type=Path, help="a file with a text on each line; the default model's kind if absent"
    )
    parser.add_argument("--documents", type=int, default=400)
    options = parser.parse_args()
    tokenizer = Tokenizer.load(options.checkpoint)
    texts = options.texts.read_text().splitlines() if options.texts else held_out(options.documents)
    prompts = [ids[:MAX_TOKENS] for text in texts if len(ids := tokenizer.encode_plain(text)) > 1]
    results: dict[str, dict[str, float]] = {}
    expected: list[Tensor] = []
    for dtype, (suffix, others) in itertools.product(TYPES, OPTIONS.items()):
        engine = load(options.checkpoint, dtype, others)
        losses, likeliest = zip(*(judge(engine, ids) for ids in prompts), strict=True)
        expected = expected or list(likeliest)
        equal = torch.cat([a == b for a, b in zip(likeliest, expected, strict=True)]).float().mean()
        name = dtype + suffix
        results[name] = {
            "perplexity": round(math.exp(float(torch.cat(losses).mean())), 4),
            "likeliest equal": round(float(equal), 4),
        }
        print(f"{name:20} perplexity {results[name]['perplexity']:.4f}, likeliest equal {float(equal):.2%}", flush=True)
    num_tokens = sum(len(ids) - 1 for ids in prompts)
    print(json.dumps({"machine": machine(), "tokens": num_tokens, "results": results}))
    return 0


def held_out(count: int) -> list[str]:
    """Of the default model's kind."""
    sys.path.insert(0, str(ROOT / "ci" / "default_model"))
    from corpus import documents

    found: Iterator[str] = documents(HELD_OUT_SEED, count)
    return list(found)


def load(checkpoint: Path, dtype: str, others: dict[str, str]) -> LoadedEngine:
    parameters = {
        "gpt_model_path": str(checkpoint),
        "device": "cpu",
        "dtype": dtype,
        "cpu_compile": "true",
        "max_num_tokens": str(MAX_TOKENS),
        "max_batch_size": "1",
        "tokens_per_block": str(BLOCK_SIZE),
        "max_tokens_in_paged_kv_cache": str(2 * MAX_TOKENS),
        **others,
    }
    return load_engine(EngineConfig.from_parameters(parameters), SingleRank())


@torch.inference_mode()
def judge(engine: LoadedEngine, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Of each token but the first: minus the logarithm of its probability; and the likeliest one in its place."""
    token_ids = torch.tensor(ids)
    metadata = prompt_metadata(len(ids), len(engine.store.windows))
    hidden = engine.decoder.forward(token_ids, engine.store.states, metadata)
    logits = engine.decoder.logits(hidden)[:-1].float()
    losses = -logits.log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]
    return losses, logits.argmax(-1)


def prompt_metadata(num_tokens: int, num_groups: int) -> AttentionMetadata:
    """Of one prompt, in the first blocks of the cache. `num_groups`: of layers with blocks of their own."""
    blocks = torch.arange(-(-num_tokens // BLOCK_SIZE), dtype=torch.int32)[None]
    firsts = range(0, num_groups * blocks.numel(), blocks.numel())
    nothing = torch.empty(0, dtype=torch.int32)
    return AttentionMetadata(
        positions_T=torch.arange(num_tokens),
        blocks=tuple(StepBlocks(torch.arange(num_tokens) + first * BLOCK_SIZE, blocks + first) for first in firsts),
        num_decodes=0,
        decode_rows_N=torch.empty(0, dtype=torch.int64),
        decode_seq_lens_N=nothing,
        num_prefills=1,
        prefill_rows_P=torch.arange(1),
        prefill_seq_lens_P=torch.tensor([num_tokens], dtype=torch.int32),
        prefill_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        max_prefill_len=num_tokens,
    )


if __name__ == "__main__":
    sys.exit(main())
