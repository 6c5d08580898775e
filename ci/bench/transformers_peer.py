"""transformers' generate in a process of its own, as it is used: asked and answered in lines of JSON.

In: {"prompts": [[token ids]], "num_tokens": n}. Out: {"seconds": s}, for one static batch that is padded on the left
and runs until every row has n new tokens. Greedy, sdpa, bfloat16.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def main(checkpoint: str, num_threads: int) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(num_threads)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"seconds": run(model, asked["prompts"], asked["num_tokens"])}), flush=True)


@torch.inference_mode()
def run(model: torch.nn.Module, prompts: list[list[int]], num_tokens: int) -> float:
    """Seconds of one batch."""
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    start = time.perf_counter()
    model.generate(
        input_ids,
        attention_mask=mask,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return time.perf_counter() - start


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
