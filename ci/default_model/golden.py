"""Writes the golden file: what transformers' greedy search says to a few prompts, in float32.

`python ci/default_model/golden.py --checkpoint FOLDER --out ci/golden/default_model.json`
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TypedDict

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

NEW_TOKENS = 48
PROMPTS: dict[str, str | list[dict[str, str]]] = {
    "story": "Once upon a time",
    "story of a duck": "Once upon a time there was a little duck named",
    "inside a story": "Rosa wanted to learn how to swim. She tried once,",
    "question": "Question: What is the opposite of hot?\nAnswer:",
    "unicode": "One sunny day, José and Zoë saw a 🦊 near the café.",
    "request for a story": [{"role": "user", "content": "Tell me a story about a fox."}],
    "chat": [{"role": "user", "content": "What is the capital of France?"}],
    "chat with unicode": [{"role": "user", "content": "Show me a fox emoji."}],
    "long chat": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! How can I help you today?"},
        {"role": "user", "content": "What is 3 plus 4?"},
    ],
}


class Golden(TypedDict):
    """One prompt and its greedy continuation; `token_ids` ends at the first end token, which it holds."""

    name: str
    prompt: str
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    min_margin: float


def render(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, str]]) -> tuple[str, list[int]]:
    """The prompt as text and as ids; the text holds the begin mark only where the chat template writes it."""
    if isinstance(prompt, str):
        return prompt, tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return text, tokenizer(text, add_special_tokens=False)["input_ids"]


def greedy(network: PreTrainedModel, prompt_ids: list[int], max_new_tokens: int) -> tuple[list[int], float]:
    """The greedy continuation, and the smallest gap between the best and the second logit of any of its steps."""
    result = network.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(result.logits).topk(2, dim=-1).values
    return result.sequences[0, len(prompt_ids) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def make(checkpoint: Path) -> list[Golden]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    network = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    goldens: list[Golden] = []
    for name, prompt in PROMPTS.items():
        text, prompt_ids = render(tokenizer, prompt)
        token_ids, margin = greedy(network, prompt_ids, NEW_TOKENS)
        goldens.append(
            Golden(
                name=name,
                prompt=text,
                prompt_ids=prompt_ids,
                token_ids=token_ids,
                text=tokenizer.decode(token_ids, skip_special_tokens=True),
                min_margin=round(margin, 4),
            )
        )
    return goldens


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the golden outputs of a checkpoint.")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    goldens = make(arguments.checkpoint)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(goldens, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    for golden in goldens:
        print(f"{golden['name']} (margin {golden['min_margin']}): {golden['prompt']!r} → {golden['text']!r}")


if __name__ == "__main__":
    main()
