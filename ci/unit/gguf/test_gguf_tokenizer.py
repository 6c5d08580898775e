"""Texts have the tokens of the tokenizer that a GGUF file was written of, whatever divides them into words; what is not
known is refused with the remedy.

Run: pytest ci/unit/gguf/test_gguf_tokenizer.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf_files import write_tokenizer
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer
from transformers.integrations.ggml import convert_gguf_tokenizer

from inflight.asking.chat_template import ChatTemplate
from inflight.errors import ConfigurationError
from inflight.gguf.file import GgufFile
from inflight.gguf.tokenizer import Vocabulary, tokenizer_config, tokenizer_of
from inflight.text.tokenizer import Tokenizer

CHECKPOINT = Path(__file__).resolve().parents[3] / "model_repository" / "llm" / "1" / "checkpoint"
LEARNED = [
    "the cat sat on the mat, and the other cats didn't: they're 12345 of them, aren't they?",
    "def main():\n    return [x for x in range(10)]\n\n\nclass ABC(Base):\n\tpass  # YES!",
    "Ärger über Straßen; naïve café — 3.14159 and 1,000,000.\r\n\r\n",
    "Привет, мир! こんにちは世界。 안녕하세요 세계 مرحبا",
    "HTTPServer getURLFor userID XMLHttpRequest O'Neill I'LL WE'VE https://example.org/a/b//c",
    "हिन्दी में का की के",
]
TEXTS = [
    *LEARNED,
    "",
    " ",
    "   two  spaces and a tab\tand\n \n  lines\n\n",
    "the cats' 7 lives, 77 lives, 777 lives, 7777777 lives",
    "e\u0301 is \u00e9, \ufb01 too",
    "का.foo की*bar #tag /path 12世界かな34カナ",
    "unseen: 🙂 \u2603 ޖ ꙮ \x00\x7f",
    "<|start|>the cat<|end|> sat <tool> on<|end|>",
    "<|start|> <|start|>\n",
]
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+CONTRACTION"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*CONTRACTION"
    r"|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PLAIN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
WORDS: dict[str, tuple[str, ...]] = {
    "llama-bpe": (PLAIN.replace("DIGITS", "{1,3}"),),
    "dbrx": (PLAIN.replace("DIGITS", "{1,3}"),),
    "qwen2": (PLAIN.replace("DIGITS", ""),),
    "tekken": (CASED.replace("DIGITS", "").replace("CONTRACTION", ""),),
    "gpt-4o": (CASED.replace("DIGITS", "{1,3}").replace("CONTRACTION", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"),),
    "qwen35": (
        PLAIN.replace("DIGITS", "").replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}"),
    ),
    "deepseek-v3": DEEPSEEK,
    "gpt-2": (),
    "smollm": (),
}
"""Expressions of the published tokenizer.json of Llama 3, Phi-4, Qwen2, Mistral Nemo, Phi-4-mini, Qwen3.5 and
DeepSeek-V3."""


def original(division: str) -> tokenizers.Tokenizer:
    """A small tokenizer of this kind, trained here."""
    found = tokenizers.Tokenizer(models.BPE(ignore_merges=division in ("llama-bpe", "tekken")))
    patterns = WORDS[division]
    parts: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns))
    if division == "smollm":
        parts.insert(0, pre_tokenizers.Digits(individual_digits=True))
    if division in ("qwen2", "qwen35"):
        found.normalizer = normalizers.NFC()
    found.pre_tokenizer = pre_tokenizers.Sequence(parts)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    found.train_from_iterator(LEARNED * 3, trainer)
    found.add_special_tokens(["<|start|>", "<|end|>"])
    found.add_tokens([AddedToken("<tool>", normalized=False)])
    return found


def read(path: Path) -> tokenizers.Tokenizer:
    return tokenizer_of(Vocabulary.of(GgufFile(path).metadata))


@pytest.mark.parametrize("division", WORDS)
def test_texts_have_the_tokens_of_the_original(division: str, tmp_path: Path) -> None:
    expected = original(division)
    path = tmp_path / "x.gguf"
    write_tokenizer(path, expected, "gpt2", division, add_bos_token=False)
    found = read(path)
    for text in TEXTS:
        tokens = found.encode(text).ids
        assert tokens == expected.encode(text).ids
        assert found.decode(tokens, skip_special_tokens=False) == expected.decode(tokens, skip_special_tokens=False)
    assert found.get_vocab() == expected.get_vocab()
    assert found.get_added_tokens_decoder() == expected.get_added_tokens_decoder()


def test_other_divisions_have_other_tokens(tmp_path: Path) -> None:
    """So that the texts above tell them apart."""
    tokens = set()
    for division in WORDS:
        path = tmp_path / f"{division}.gguf"
        write_tokenizer(path, original("deepseek-v3"), "gpt2", division, add_bos_token=False)
        found = read(path)
        tokens.add(str([found.encode(text).ids for text in TEXTS]))
    # Phi-4's differs from Llama 3's in known words only.
    assert len(tokens) >= len(WORDS) - 1


def test_the_default_model_keeps_its_tokens_its_template_and_its_special_tokens(tmp_path: Path) -> None:
    expected = Tokenizer.load(CHECKPOINT)
    template = (CHECKPOINT / "chat_template.jinja").read_text(encoding="utf-8")
    path = tmp_path / "x.gguf"
    special = {"bos_token_id": 1, "eos_token_id": 2, "eot_token_id": 3, "padding_token_id": 0, "add_bos_token": True}
    backend = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    write_tokenizer(path, backend, "gpt2", "gpt-2", chat_template=template, **special)
    vocabulary = Vocabulary.of(GgufFile(path).metadata)
    (tmp_path / "tokenizer.json").write_text(tokenizer_of(vocabulary).to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(vocabulary)))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": vocabulary.end_ids}))
    found = Tokenizer.load(tmp_path)
    assert [found.encode(text) for text in TEXTS] == [expected.encode(text) for text in TEXTS]
    assert found.encode("the")[0] == 1 == vocabulary.special_id("bos")
    assert (found.end_ids, found.pad_id, found.special_ids) == (expected.end_ids, expected.pad_id, expected.special_ids)
    assert found.max_bytes_per_token == expected.max_bytes_per_token
    chat = [{"role": "user", "content": "Hello"}]
    ours, theirs = ChatTemplate.load(tmp_path), ChatTemplate.load(CHECKPOINT)
    assert ours is not None and theirs is not None
    assert ours.render(chat, add_generation_prompt=True, continue_final_message=False) == theirs.render(
        chat, add_generation_prompt=True, continue_final_message=False
    )


# -- SentencePiece -----------------------------------------------------------------------------------------------------


def pieces() -> tokenizers.Tokenizer:
    """As Llama 2 has it: three special tokens, the bytes, then pieces, the best ones first."""
    found = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts = [word for text in LEARNED for word in text.split()] * 3
    found.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=700, special_tokens=special))
    state = json.loads(found.to_str())
    state["added_tokens"] = [each for each in state["added_tokens"] if not each["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


@pytest.mark.parametrize("has_prefix", [True, False])
def test_pieces_are_joined_as_transformers_joins_them(has_prefix: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    special = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_space_prefix": has_prefix}
    write_tokenizer(path, pieces(), "llama", **special)
    metadata = GgufFile(path).metadata
    prefix = "tokenizer.ggml."
    theirs = {key.removeprefix(prefix): value for key, value in metadata.values.items() if key.startswith(prefix)}
    names = {"model": "tokenizer_type", "token_type": "token_type"}
    expected, _ = convert_gguf_tokenizer(
        "llama",
        {names.get(key, key): list(value) if isinstance(value, tuple) else value for key, value in theirs.items()},
    )
    if not has_prefix:  # which it does not look for
        expected.normalizer = normalizers.Replace(" ", "▁")
    found = read(path)
    for text in TEXTS:
        tokens = found.encode(text).ids
        assert tokens[0] == 1
        assert tokens[1:] == expected.encode(text, add_special_tokens=False).ids
        assert found.decode(tokens) == text.replace("</s>", "")
    loaded = Tokenizer(found, [2])
    assert type(loaded.byte_tokens).__name__ == "ByteFallback" and loaded.max_bytes_per_token is not None


def test_pieces_whose_merges_the_file_has_are_joined_as_those_of_gemma(tmp_path: Path) -> None:
    state = json.loads(pieces().to_str())["model"]
    merges = [tuple(merge) for merge in state["merges"]]
    expected = GemmaTokenizer(vocab=state["vocab"], merges=merges, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    path = tmp_path / "x.gguf"
    write_tokenizer(path, pieces(), "gemma4", bos_token_id=1, eos_token_id=2, unknown_token_id=0)
    found = read(path)
    for text in TEXTS:
        tokens = found.encode(text).ids
        assert tokens == [1, *expected.encode(text, add_special_tokens=False)]
        assert found.decode(tokens) == text


# -- what ends an answer, and what is refused --------------------------------------------------------------------------


def test_tokens_that_end_an_answer_are_those_that_the_file_names_and_those_of_turns(tmp_path: Path) -> None:
    tokenizer = original("gpt-2")
    tokenizer.add_special_tokens(["<|im_end|>", "<end_of_turn>", "<turn|>", "<|return|>", "<|other|>"])
    tokenizer.add_tokens(["<|eot_id|>"])  # a word, that a text may hold
    path = tmp_path / "x.gguf"
    write_tokenizer(path, tokenizer, "gpt2", "gpt-2", eos_token_id=5, eot_token_id=9)
    ends = {
        tokenizer.token_to_id(token) for token in ("<|im_end|>", "<end_of_turn>", "<turn|>", "<|return|>", "<|end|>")
    }
    assert Vocabulary.of(GgufFile(path).metadata).end_ids == sorted({5, 9} | ends)


def test_an_answer_of_gpt_oss_goes_on_after_its_first_message(tmp_path: Path) -> None:
    tokenizer = original("gpt-2")
    tokenizer.add_special_tokens(["<|return|>", "<|call|>"])
    path = tmp_path / "x.gguf"
    write_tokenizer(path, tokenizer, "gpt2", "gpt-2")
    ends = [tokenizer.token_to_id(token) for token in ("<|return|>", "<|call|>")]
    assert Vocabulary.of(GgufFile(path).metadata).end_ids == ends


def test_a_beginning_is_added_where_the_model_learned_one(tmp_path: Path) -> None:
    tokenizer, path = original("gpt-2"), tmp_path / "x.gguf"
    start, end = (tokenizer.token_to_id(token) for token in ("<|start|>", "<|end|>"))
    for division, values, adds in (
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ):
        write_tokenizer(path, tokenizer, "gpt2", division, bos_token_id=start, eos_token_id=end, **values)
        assert (read(path).encode("a").ids[0] == start) == adds
    write_tokenizer(path, tokenizer, "gpt2", "qwen2", eos_token_id=end, add_eos_token=True)
    assert read(path).encode("a").ids[-1] == end


@pytest.mark.parametrize(
    ("kind", "division", "values", "sentence"),
    [
        ("gpt2", "unheard-of", {}, "tokenizer.ggml.pre 'unheard-of' is not known, so that texts may be given other"),
        ("gpt2", None, {}, "the metadata has no tokenizer.ggml.pre, so that texts may be given other"),
        ("t5", "default", {}, "tokenizer.ggml.model 't5' is not supported; gpt2, llama and gemma4 are, or set"),
        ("gpt2", "llama-bpe", {"bos_token_id": 9999}, "tokenizer.ggml.bos_token_id 9999 is not one of"),
    ],
)
def test_what_is_not_known_is_refused(
    kind: str, division: str | None, values: dict[str, int], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.gguf"
    write_tokenizer(path, original("gpt-2"), kind, division, **values)
    with pytest.raises(ConfigurationError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: {sentence}")
