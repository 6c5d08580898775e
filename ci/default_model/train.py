"""Trains the default checkpoint: `python ci/default_model/train.py --out FOLDER`.

Text comes from `corpus`, the network is transformers' own Llama, and the folder is what `save_pretrained` writes.
Everything is seeded: the same machine, thread count and torch give the same weights.
"""

from __future__ import annotations

import argparse
import math
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import torch
from corpus import END_OF_TEXT, END_OF_TURN, documents
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from vocabulary import MAX_LENGTH, VOCABULARY_SIZE, train_tokenizer

SEED = 20
WORDS_SEED = 21
TOKENIZER_DOCUMENTS = 5_000


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to learn. A step sees `tokens_per_step` tokens, cut into rows of one length.

    Short rows at first, because they are cheaper; then rows that hold a long conversation, and among them every so
    often one of the longest context that the model may be served with, so that it stays sensible there although no
    document is that long.
    """

    steps: int
    tokens_per_step: int = 2048
    short_row: int = 256
    long_row: int = 512
    short_share: float = 0.5
    longest_every: int = 16
    peak_rate: float = 3e-3
    warmup_steps: int = 100

    def rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to a hundredth of the peak."""
        if step < self.warmup_steps:
            return self.peak_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.peak_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))

    def row_length(self, step: int) -> int:
        if step < self.short_share * self.steps:
            return self.short_row
        return MAX_LENGTH if step % self.longest_every == 0 else self.long_row


def network_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """4.9 M parameters; heads and KV heads divide by four ranks."""
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=end_ids(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
    )


def end_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The tokens that end a text: its own end, and the end of the assistant's turn."""
    return [tokenizer.convert_tokens_to_ids(token) for token in (END_OF_TEXT, END_OF_TURN)]


def tokenized_corpus(tokenizer: PreTrainedTokenizerFast, schedule: Schedule) -> torch.Tensor:
    """(steps * tokens_per_step,) int16: documents end to end; nothing is seen twice."""
    num_tokens = schedule.steps * schedule.tokens_per_step
    texts = documents(SEED, num_tokens)
    ids = array("h")
    while len(ids) < num_tokens:
        for row in tokenizer(list(islice(texts, 1000)), add_special_tokens=False)["input_ids"]:
            ids.extend(row)
    return torch.tensor(ids[:num_tokens], dtype=torch.int16)


def batches(corpus: torch.Tensor, schedule: Schedule) -> Iterator[torch.Tensor]:
    """One (rows, row_length) int64 batch a step, in the corpus's order."""
    for step, tokens in enumerate(corpus.split(schedule.tokens_per_step)):
        yield tokens.view(-1, schedule.row_length(step)).long()


def make_optimizers(network: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, because it learns rare facts from less text; AdamW for embeddings and norms."""
    matrices = [parameter for parameter in network.model.layers.parameters() if parameter.ndim == 2]
    norms = [parameter for parameter in network.parameters() if parameter.ndim == 1]
    return [
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([*norms, network.model.embed_tokens.weight], betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def train(network: LlamaForCausalLM, corpus: torch.Tensor, schedule: Schedule) -> float:
    """Trains in place, in bfloat16 arithmetic over float32 weights. Returns the mean loss of the last 50 steps."""
    optimizers = make_optimizers(network)
    losses: list[float] = []
    started = time.monotonic()
    network.train()
    for step, batch in enumerate(batches(corpus, schedule)):
        for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
            group["lr"] = schedule.rate(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = network(input_ids=batch, use_cache=False).logits
        targets = batch[:, 1:].reshape(-1)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(len(targets), -1).float(), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step % 50 == 49 or step == schedule.steps - 1:
            elapsed = time.monotonic() - started
            print(
                f"step {step + 1}/{schedule.steps}  loss {sum(losses[-50:]) / len(losses[-50:]):.4f}  "
                f"{(step + 1) * schedule.tokens_per_step / elapsed:.0f} tokens/s  {elapsed:.0f} s",
                flush=True,
            )
    return sum(losses[-50:]) / len(losses[-50:])


def save(network: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes weights in bfloat16, both configurations and the tokenizer, in Hugging Face's own files."""
    network.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=end_ids(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
    )
    network.to(torch.bfloat16).save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)  # they are written for their owner alone, but a server may run as somebody else
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the default checkpoint on generated text.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--steps", type=int, default=1600, help="training steps of 2048 tokens each")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; part of what makes a run repeatable")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)
    schedule = Schedule(steps=arguments.steps)
    tokenizer = train_tokenizer(documents(WORDS_SEED, TOKENIZER_DOCUMENTS))
    corpus = tokenized_corpus(tokenizer, schedule)
    network = LlamaForCausalLM(network_config(tokenizer))
    print(f"{network.num_parameters():,} parameters, {len(corpus):,} tokens", flush=True)
    loss = train(network, corpus, schedule)
    save(network, tokenizer, arguments.out)
    print(f"wrote {arguments.out}; the loss of the last steps was {loss:.4f}")


if __name__ == "__main__":
    main()
