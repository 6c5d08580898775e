"""What a reranker that is a language model reads of a question and a document, held against transformers' templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_tokenizer import byte_tokenizer_with
from transformers import PreTrainedTokenizerFast

from inflight.asking.ask import TextPair
from inflight.asking.pair_template import PairTemplate, find_pair_template
from inflight.asking.prompt_encoder import PromptEncoder, shortened
from inflight.asking.sentence_files import find_activation
from inflight.checkpoint_files import LOGIT_SCORE
from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.hub.wanted_files import small_files
from inflight.request_limits import RequestLimits

TEMPLATE = """{%- for message in messages if message['role'] == 'system' %}<|im_start|>{{ message['content'] }}
{% endfor %}
{%- set asked = messages | selectattr("role", "eq", "query") | map(attribute="content") | first %}
{%- set given = messages | selectattr("role", "eq", "document") | map(attribute="content") | first %}
Q: {{ asked }}
D: {{ given | trim }}<|im_end|>
{%- if add_generation_prompt %}
A: {% endif %}"""
TOKENIZER = byte_tokenizer_with("<|im_start|>", "<|im_end|>")
LIMITS = RequestLimits(
    vocab_size=300,
    max_seq_len=512,
    max_input_len=511,
    kv_cache_tokens=512,
    pooled="scores",
    num_labels=1,
    is_causal=True,
)
PAIR = TextPair("what?", "a text of some length")


def folder_with(folder: Path, template: str | None = None, **files: Any) -> Path:
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    for name, values in {"config": {"model_type": "qwen3"}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    (folder / "tokenizer.json").write_text(TOKENIZER._backend.to_str())
    return folder


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(gpt_model_path=str(folder), **options)


@pytest.mark.parametrize("instruction", ["", "find answers"])
def test_the_checkpoints_template_writes_both(tmp_path: Path, instruction: str) -> None:
    prompts = {"prompts": {"task": "find answers"}, "default_prompt_name": "task" if instruction else None}
    found = find_pair_template(config_of(folder_with(tmp_path, TEMPLATE, config_sentence_transformers=prompts)))
    assert found is not None
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), chat_template=TEMPLATE)
    messages = [{"role": "system", "content": instruction}] if instruction else []
    messages += [{"role": "query", "content": PAIR.first}, {"role": "document", "content": PAIR.second}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    encoded = PromptEncoder(TOKENIZER, pair_template=found).encode_pair(PAIR, LIMITS)
    assert (encoded.token_ids, encoded.second_text_start) == (expected, 0)


def test_a_reranker_of_qwen3_has_its_own_where_its_files_have_none(tmp_path: Path) -> None:
    """Which is sentence-transformers' and the model card's for it."""
    usual = "{% for message in messages %}{{ message['role'] + message['content'] }}{% endfor %}"
    found = find_pair_template(config_of(folder_with(tmp_path, usual), score_tokens="n,y"))
    assert found is not None
    text = found.render(PAIR)
    assert text.startswith("<|im_start|>system\nJudge whether the Document meets the requirements")
    asked = "Given a web search query, retrieve relevant passages that answer the query"
    assert (
        f"<|im_start|>user\n<Instruct>: {asked}\n<Query>: {PAIR.first}\n<Document>: {PAIR.second}<|im_end|>\n" in text
    )
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    settings = {"prompts": {"task": "find facts"}, "default_prompt_name": "task"}
    folder_with(tmp_path, config_sentence_transformers=settings)
    again = find_pair_template(config_of(tmp_path, score_tokens="n,y"))
    assert again is not None and "<Instruct>: find facts\n" in again.render(PAIR)


def test_others_must_say_how_they_are_asked(tmp_path: Path) -> None:
    config = config_of(folder_with(tmp_path, config={"model_type": "llama"}), score_tokens="n,y")
    with pytest.raises(ConfigurationError, match=r"give it a chat_template\.jinja that has them"):
        find_pair_template(config)
    assert find_pair_template(config_of(tmp_path)) is None, "a language model, or an encoder"


def test_a_template_without_the_document_is_refused(tmp_path: Path) -> None:
    template = """{{ messages[0]["content"] }} {# "query" and "document" #}"""
    with pytest.raises(ConfigurationError, match="does not write the message of role document once"):
        find_pair_template(config_of(folder_with(tmp_path, template)))


@pytest.mark.parametrize("kept", [511, 60, 45, 44])
def test_the_document_is_cut_and_what_is_behind_it_stays(tmp_path: Path, kept: int) -> None:
    found = find_pair_template(config_of(folder_with(tmp_path, TEMPLATE)))
    assert found is not None
    pair = PromptEncoder(TOKENIZER, pair_template=found).encode_pair(PAIR, LIMITS, is_cut=True)
    before, behind = (TOKENIZER.encode_plain(text) for text in found.around(PAIR.first))
    assert (pair.num_before, pair.num_behind) == (len(before), len(behind))
    cut = shortened(pair.token_ids, kept, pair.num_behind)
    document = TOKENIZER.encode_plain(PAIR.second)[: max(kept - len(before) - len(behind), 0)]
    assert cut == ([*before, *document, *behind] if kept < 500 else pair.token_ids)


def test_tokens_that_reach_beyond_the_document_are_divided() -> None:
    class Merging:
        """Makes one token of "ab"."""

        special_ids: frozenset[int] = frozenset()
        max_bytes_per_token = None

        @staticmethod
        def encode_plain(text: str) -> list[int]:
            return list(text.replace("ab", "X").encode())

    template = PairTemplate(lambda pair: f"{pair.first}:{pair.second}b")
    encoder = PromptEncoder(Merging(), pair_template=template)  # type: ignore[arg-type]
    assert bytes(encoder.encode_pair(TextPair("q", "a"), LIMITS).token_ids) == b"q:X"
    assert bytes(encoder.encode_pair(TextPair("q", "a"), LIMITS, is_cut=True).token_ids) == b"q:ab"


def test_what_becomes_of_a_score_is_told_with_the_prompts(tmp_path: Path) -> None:
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"}
    folder_with(tmp_path, config={"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}})
    assert find_activation(tmp_path) == "sigmoid"
    folder_with(tmp_path, config_sentence_transformers=identity)
    assert find_activation(tmp_path) == "identity"


def test_the_file_of_its_tokens_is_fetched() -> None:
    assert small_files([LOGIT_SCORE, "README.md"]) == [LOGIT_SCORE]
