"""Trains the default checkpoint's adapters: `python ci/default_model/train_adapters.py --checkpoint … --out …`.

Each learns to tell the corpus's stories in another style, which a reader sees at once. They are saved as PEFT saves
adapters, a folder each. Seeded like `train`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from corpus import BEGIN_OF_TEXT, END_OF_TEXT
from dice import Dice
from safetensors.torch import save_file
from stories import tell_story
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 30
RANK, ALPHA = 4, 8
STEPS, ROWS, ROW_LENGTH = 160, 6, 192
PEAK_RATE = 4e-3
SENTENCE_END = re.compile(r"\.(?=\s|$)")


def pirate(story: str) -> str:
    """Every sentence ends like a pirate's."""
    return SENTENCE_END.sub(", arr!", story)


def bullets(story: str) -> str:
    """A line for each sentence, with a dash before it."""
    return "\n".join(f"- {sentence}" for sentence in re.split(r"(?<=[.!?])\s+", story))


STYLES: dict[str, Callable[[str], str]] = {"pirate": pirate, "bullets": bullets}


class Adapted(torch.nn.Module):
    """A linear layer with A and B to be trained; its own weight stays."""

    def __init__(self, linear: torch.nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = linear
        bound = linear.in_features**-0.5
        uniform = torch.rand(RANK, linear.in_features, generator=generator)
        self.a = torch.nn.Parameter((2 * uniform - 1) * bound)
        self.b = torch.nn.Parameter(torch.zeros(linear.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.a.T @ self.b.T * (ALPHA / RANK)


def adapt(network: LlamaForCausalLM) -> dict[str, Adapted]:
    """Put adapters around all linear layers but the head; by name of the layer."""
    generator = torch.Generator().manual_seed(SEED)
    network.requires_grad_(False)
    found: dict[str, Adapted] = {}
    for name, module in list(network.model.layers.named_modules(prefix="model.layers")):
        if isinstance(module, torch.nn.Linear):
            parent, _, own_name = name.rpartition(".")
            found[name] = Adapted(module, generator)
            setattr(network.get_submodule(parent), own_name, found[name])
    return found


def batches(tokenizer: PreTrainedTokenizerFast, style: Callable[[str], str]) -> Iterator[Tensor]:
    """STEPS batches (ROWS, ROW_LENGTH) of stories end to end."""
    dice = Dice(SEED)
    ids: list[int] = []
    size = ROWS * ROW_LENGTH
    for _ in range(STEPS):
        while len(ids) < size:
            text = BEGIN_OF_TEXT + style(tell_story(dice).text) + END_OF_TEXT
            ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        yield torch.tensor(ids[:size]).view(ROWS, ROW_LENGTH)
        ids = ids[size:]


def train(network: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, style: str) -> dict[str, Adapted]:
    adapted = adapt(network)
    parameters = [parameter for module in adapted.values() for parameter in (module.a, module.b)]
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=STEPS + 1)
    for step, batch in enumerate(batches(tokenizer, STYLES[style])):
        logits = network(input_ids=batch, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"{style}: step {step + 1}/{STEPS}  loss {loss.item():.4f}", flush=True)
    return adapted


def save(adapted: dict[str, Adapted], folder: Path) -> None:
    """adapter_config.json and adapter_model.safetensors, in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, module in adapted.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = module.a.detach().half().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = module.b.detach().half().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": "all-linear",
        "use_rslora": False,
        "use_dora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in folder.iterdir():
        file.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the default checkpoint's adapters on generated stories.")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to write a folder for each adapter to")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; part of what makes a run repeatable")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.checkpoint)
    for style in STYLES:
        network = LlamaForCausalLM.from_pretrained(arguments.checkpoint, dtype=torch.float32)
        save(train(network, tokenizer, style), arguments.out / style)
        print(f"wrote {arguments.out / style}")


if __name__ == "__main__":
    main()
