"""transformers' generate in a process of its own, as it is used: asked and answered in lines of JSON.

In: {"prompts": [[token ids]], "num_tokens": n}, and whatever of a Batch is not as usual. Out: {"seconds": s}, for one
static batch that is padded on the left and runs until every row has n new tokens. sdpa, bfloat16. Adapters go through
PEFT, grammars through XGrammar's own processor for transformers.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import xgrammar
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList
from transformers.utils import logging
from xgrammar.contrib.hf import LogitsProcessor


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    prompts: list[list[int]]
    num_tokens: int
    """Of every row."""
    num_beams: int = 1
    num_return_sequences: int = 1
    is_random: bool = False
    """At temperature 1, otherwise greedy."""
    adapters: list[str] | None = None
    """The name of each row's LoRA adapter; None = the network alone."""
    schema: str = ""
    """JSON schema that every row follows; empty = none."""


class Peer:
    def __init__(self, checkpoint: str, tokenizer: str, adapters: str) -> None:
        """`adapters`: a folder of PEFT folders; empty = none."""
        self._model = load(checkpoint)
        # A network of its own: PEFT changes the layers of the one that it is given.
        self._adapted = with_adapters(load(checkpoint), sorted(Path(adapters).iterdir())) if adapters else None
        self._tokenizer = tokenizer
        self._grammars: dict[str, xgrammar.CompiledGrammar] = {}

    @torch.inference_mode()
    def run(self, batch: Batch) -> float:
        """Seconds that it takes."""
        longest = max(map(len, batch.prompts))
        input_ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in batch.prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch.prompts])
        options: dict[str, Any] = {}
        if batch.adapters:
            options["adapter_names"] = batch.adapters
        if batch.schema:
            options["logits_processor"] = LogitsProcessorList([LogitsProcessor(self._grammar(batch.schema))])
        start = time.perf_counter()
        model = self._adapted if batch.adapters else self._model
        model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            max_new_tokens=batch.num_tokens,
            min_new_tokens=batch.num_tokens,
            do_sample=batch.is_random,
            top_k=0,
            num_beams=batch.num_beams,
            num_return_sequences=batch.num_return_sequences,
            pad_token_id=0,
            **options,
        )
        return time.perf_counter() - start

    def _grammar(self, schema: str) -> xgrammar.CompiledGrammar:
        if schema not in self._grammars:
            tokenizer = AutoTokenizer.from_pretrained(self._tokenizer)
            found = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=self._model.config.vocab_size)
            self._grammars[schema] = xgrammar.GrammarCompiler(found).compile_json_schema(schema)
        return self._grammars[schema]


def load(checkpoint: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def with_adapters(model: Any, folders: list[Path]) -> Any:
    from peft import PeftModel

    first, *others = folders
    adapted = PeftModel.from_pretrained(model, str(first), adapter_name=first.name)
    for folder in others:
        adapted.load_adapter(str(folder), adapter_name=folder.name)
    return adapted.eval()


def main(checkpoint: str, tokenizer: str, adapters: str, num_threads: str) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(int(num_threads))
    peer = Peer(checkpoint, tokenizer, adapters)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        seconds = peer.run(msgspec.json.decode(line, type=Batch))
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
