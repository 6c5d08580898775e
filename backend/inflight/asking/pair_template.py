"""What a language model reads of a question and of a text that may answer it, when its answer is a score.

As sentence-transformers has it, the checkpoint's chat template writes two messages with the roles query and document,
and before them a system message if there is an instruction. Knows no tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from inflight.asking.ask import TextPair
from inflight.asking.chat_template import ChatTemplate, read_json
from inflight.asking.sentence_files import find_prompts
from inflight.checkpoint_files import CONFIG
from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.score_tokens import find_score_tokens

ROLES = ("query", "document")
QUOTED = [re.compile(f"""(["']){role}\\1""") for role in ROLES]
"""What a template holds that knows them."""
MARK = "\u27e8text\u27e9"
"""In the place of the second text, to find what stands around it."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Qwen3-Reranker's own, where the checkpoint names none."""


class PairTemplate:
    """Safe to use from several threads."""

    def __init__(self, render: Callable[[TextPair], str]) -> None:
        """`render`: may raise Refusal. Raises ConfigurationError for one that does not write the second text once."""
        self.render = render
        if self.render(TextPair("a", MARK)).count(MARK) != 1:
            raise ConfigurationError("the checkpoint's chat template does not write the message of role document once")

    def around(self, first: str) -> tuple[str, str]:
        """What stands before and behind the second text. Raises Refusal."""
        before, _, behind = self.render(TextPair(first, MARK)).rpartition(MARK)
        return before, behind

    @classmethod
    def of_chats(cls, template: ChatTemplate, instruction: str) -> PairTemplate:
        """`instruction`: "" = none. Raises ConfigurationError."""
        system = [{"role": "system", "content": instruction}] if instruction else []

        def render(pair: TextPair) -> str:
            texts = zip(ROLES, (pair.first, pair.second), strict=True)
            return template.render(
                [*system, *({"role": role, "content": text} for role, text in texts)],
                add_generation_prompt=True,
                continue_final_message=False,
            )

        return cls(render)

    @classmethod
    def of_qwen3(cls, instruction: str) -> PairTemplate:
        """Of Qwen3-Reranker as first published, whose files do not say it
        (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B)."""
        task = (
            "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
            'Note that the answer can only be "yes" or "no".'
        )

        def render(pair: TextPair) -> str:
            asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {pair.first}\n<Document>: {pair.second}"
            return (
                f"<|im_start|>system\n{task}<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n"
                "<|im_start|>assistant\n<think>\n\n</think>\n\n"
            )

        return cls(render)


def find_pair_template(config: EngineConfig) -> PairTemplate | None:
    """None = the tokenizer joins the texts of a pair. Raises ConfigurationError for a checkpoint that scores texts by
    logits of tokens, and does not say how it is asked."""
    checkpoint = Path(config.gpt_model_path)
    folder = Path(config.tokenizer_dir or checkpoint)
    prompts = find_prompts(checkpoint, is_pooling_set=True)
    instruction = "" if prompts.default_name is None else prompts.by_name[prompts.default_name]
    template = ChatTemplate.load(folder)
    if template is not None and all(quoted.search(template.source) for quoted in QUOTED):
        return PairTemplate.of_chats(template, instruction)
    if find_score_tokens(config.score_tokens, checkpoint, folder) is None:
        return None
    if read_json(checkpoint / CONFIG).get("model_type") == "qwen3":
        return PairTemplate.of_qwen3(instruction)
    raise ConfigurationError(
        f"{checkpoint} scores texts by logits of tokens, and its chat template has no roles query and document, which "
        "say how it is asked: give it a chat_template.jinja that has them"
    )
