"""The committed default checkpoint: its size, its tokenizer, its golden outputs and the text it was trained on.

`pytest ci/unit/models/test_default_model.py`. Needs no server; the oracle is transformers in float32.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
CHECKPOINT = ROOT / "model_repository/llm/1/checkpoint"
GOLDENS: list[dict[str, Any]] = json.loads((ROOT / "ci/golden/default_model.json").read_text("utf-8"))
MIN_MARGIN = 1e-3


@cache
def load_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer()


@pytest.fixture(scope="module")
def network() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


def generator_module(name: str) -> ModuleType:
    """A module of the generator's folder, which is a folder of scripts and no package."""
    sys.path.insert(0, str(ROOT / "ci/default_model"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def test_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 12 * 2**20


def test_network_is_a_small_llama_that_splits_over_four_ranks(network: PreTrainedModel) -> None:
    config = network.config
    assert config.architectures == ["LlamaForCausalLM"]
    assert network.num_parameters() <= 8_000_000
    assert config.tie_word_embeddings
    for size in (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size, config.vocab_size):
        assert size % 4 == 0


def test_every_id_has_a_token_and_ends_are_known(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == network.config.vocab_size
    ends = tokenizer.convert_tokens_to_ids(["<|end_of_text|>", "<|end_of_turn|>"])
    assert network.config.eos_token_id == network.generation_config.eos_token_id == ends
    assert tokenizer.eos_token_id in ends


@given(st.text())
@example("🦊 👩‍👩‍👧 naïve Привет 你好 \x00\t\r\n  two  spaces ")
@example("<|end_of_turn|> don 't , ok . ")
def test_any_text_round_trips(text: str) -> None:
    ids = load_tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert load_tokenizer().decode(ids) == text


def test_emoji_takes_several_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Streaming tests rely on it: half a character must be a common sight."""
    assert len(tokenizer("🦊", add_special_tokens=False)["input_ids"]) == len("🦊".encode())


def test_plain_text_begins_with_the_begin_mark(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("Once upon a time")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in ids[1:]


def test_chat_template_renders_each_role(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": " Hello! "},
        {"role": "assistant", "content": "Hi."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin_of_text|><|system|>Be kind.<|end_of_turn|><|user|>Hello!<|end_of_turn|>"
        "<|assistant|>Hi.<|end_of_turn|><|assistant|>"
    )


def test_chat_template_is_what_the_network_was_trained_on(tokenizer: PreTrainedTokenizerBase) -> None:
    dialogues, corpus, dice = (generator_module(name) for name in ("dialogues", "corpus", "dice"))
    for seed in range(20):
        messages = dialogues.converse(dice.Dice(seed))
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert text == corpus.BEGIN_OF_TEXT + corpus.render(messages)


def test_chat_template_refuses_an_unknown_role(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(TemplateError, match="not tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden["name"])
def test_golden_outputs(golden: dict[str, Any], network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Prompt ids, greedy ids and text are those of the golden file, and no step of them is a near tie."""
    maker = generator_module("golden")
    prompt, prompt_ids = maker.render(tokenizer, maker.PROMPTS[golden["name"]])
    assert (prompt, prompt_ids) == (golden["prompt"], golden["prompt_ids"])
    token_ids, margin = maker.greedy(network, prompt_ids, maker.NEW_TOKENS)
    assert token_ids == golden["token_ids"]
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == golden["text"]
    assert margin >= MIN_MARGIN


def test_goldens_cover_every_prompt() -> None:
    assert [golden["name"] for golden in GOLDENS] == list(generator_module("golden").PROMPTS)


def test_a_whole_story_ends_by_itself(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    maker = generator_module("golden")
    token_ids, _ = maker.greedy(network, tokenizer("Once upon a time")["input_ids"], 400)
    assert token_ids[-1] == tokenizer.eos_token_id
    assert 60 < len(token_ids) < 400


def test_long_context_is_not_degenerate(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Text near the last position is predicted about as well as text near the first."""
    texts = generator_module("corpus").documents(seed=99, count=60)
    longest = network.config.max_position_embeddings
    ids = tokenizer("".join(texts), add_special_tokens=False, truncation=True, max_length=longest)["input_ids"]
    assert len(ids) == longest
    batch = torch.tensor([ids])
    with torch.inference_mode():
        logits = network(batch).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, batch[0, 1:], reduction="none")
    assert losses[-512:].mean() < 2 * losses[:512].mean()


def test_generated_text_depends_on_the_seed_alone() -> None:
    corpus = generator_module("corpus")
    first, again, other = (list(corpus.documents(seed, 50)) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_story_answers_name_only_those_who_were_in_the_story() -> None:
    stories, dice, world = (generator_module(name) for name in ("stories", "dice", "world"))
    known_names = {name.text for name in world.SHE + world.HE}
    named = set()
    for seed in range(50):
        story = stories.tell_story(dice.Dice(seed))
        told = set(re.findall(r"\w+", story.text))
        asked = set(re.findall(r"\w+", " ".join(answer for _, answer in story.questions)))
        assert len(story.questions) >= 5
        assert story.hero.name.text in told
        assert asked & known_names <= told
        named |= asked & known_names
    assert len(named) > 10


def test_each_key_has_its_own_favourite_and_it_is_clear() -> None:
    """The skew keeps greedy decoding away from near ties."""
    dice = generator_module("dice").Dice(seed=3)
    favourites = set()
    for key in ("fox", "duck", "owl", "bear", "hen"):
        (first, often), (_, less_often) = Counter(dice.pick("abcdefgh", key=key) for _ in range(2000)).most_common(2)
        assert often > 1.8 * less_often
        favourites.add(first)
    assert len(favourites) > 1
