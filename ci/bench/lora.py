"""`python -m ci.bench.lora`: a batch in which every request has a low-rank adapter of its own, against one without any.

One engine, the checkpoint of `make bench` in C++. Round by round it gets the same prompts with adapters and without, in
turn. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from ci.bench.checkpoint import make_checkpoint
from ci.bench.engines import engine_config
from ci.bench.workload import prompt
from inflight.executor.in_process import InProcessExecutor
from inflight.lora import LoRARequest
from inflight.request import Request

ROOT = Path(__file__).resolve().parents[2]
BATCH, PROMPT, NEW = 16, 32, 128
HIDDEN, INTERMEDIATE, KEYS, LAYERS = 576, 1536, 192, 30
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KEYS),
    "self_attn.v_proj": (HIDDEN, KEYS),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INTERMEDIATE),
    "mlp.up_proj": (HIDDEN, INTERMEDIATE),
    "mlp.down_proj": (INTERMEDIATE, HIDDEN),
}
"""Inputs and outputs."""
GOAL = 0.7


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    parser.add_argument("--rank", type=int, default=8, help="of every adapter, on all linear layers")
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build" / "bench-135m", help="made if missing")
    options = parser.parse_args()
    checkpoint = make_checkpoint(options.checkpoint, ROOT / "model_repository" / "llm" / "1" / "checkpoint")
    adapters = ROOT / "build" / f"bench-lora-r{options.rank}"
    for number in range(BATCH):
        make_adapter(adapters / f"a{number}", options.rank, seed=number)
    config = replace(
        engine_config(checkpoint), max_loras=BATCH, lora_dir=str(adapters), lora_cache_max_adapter_size=options.rank
    )
    rates: dict[str, list[float]] = {"none": [], "adapters": []}
    rng = random.Random(20)
    executor = InProcessExecutor(config)
    with executor:
        for number in range(options.rounds + 1):
            for case, found in rates.items():
                rate = measure(executor, rng, with_adapters=case == "adapters")
                if number:
                    found.append(rate)
    without, with_adapters = median(rates["none"]), median(rates["adapters"])
    print(f"{BATCH} requests, {NEW} tokens each, rank {options.rank} on all linear layers; tokens per second")
    print(
        f"no adapters {without:,.0f}, {BATCH} adapters {with_adapters:,.0f}: {with_adapters / without:.2f}, goal {GOAL}"
    )
    print(json.dumps({"rank": options.rank, "rates": rates, "ratio": with_adapters / without}))
    return 0


def make_adapter(folder: Path, rank: int, seed: int) -> None:
    if (folder / "adapter_config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name, (num_inputs, num_outputs) in LINEARS.items():
            start = f"base_model.model.model.layers.{layer}.{name}.lora_"
            tensors[f"{start}A.weight"] = torch.randn(rank, num_inputs, generator=generator).bfloat16()
            tensors[f"{start}B.weight"] = 0.001 * torch.randn(num_outputs, rank, generator=generator).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def measure(executor: InProcessExecutor, rng: random.Random, *, with_adapters: bool) -> float:
    """Tokens per second of one batch, from its first token to its last."""
    for number in range(BATCH):
        request = Request(
            input_token_ids=prompt(rng, PROMPT),
            max_tokens=NEW,
            streaming=True,
            lora_request=LoRARequest(f"a{number}") if with_adapters else None,
        )
        executor.enqueue_request(request)
    num_running, num_tokens, start = BATCH, 0, 0.0
    while num_running:
        for response in executor.await_responses():
            assert response.result is not None, response.error_msg
            start = start or time.perf_counter()
            num_tokens += len(response.result.output_token_ids)
            num_running -= response.is_final
    return num_tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
