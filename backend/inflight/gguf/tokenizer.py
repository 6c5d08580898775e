"""The tokenizer in a GGUF file's metadata as the files of a checkpoint: tokenizer.json and tokenizer_config.json.

Three kinds of vocabularies are read: byte-level BPE, whose merges the file has ("gpt2"), SentencePiece's BPE, whose
merges follow from the scores of its pieces ("llama"), and the same with merges ("gemma4").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from inflight.errors import ConfigurationError
from inflight.gguf.architectures import ARCHITECTURE
from inflight.gguf.metadata import Metadata
from inflight.gguf.pre_tokenizers import DIVISIONS, Division

REMEDY = "set tokenizer_dir to a folder with the model's tokenizer.json"
KIND, DIVISION = "tokenizer.ggml.model", "tokenizer.ggml.pre"
BYTE_LEVEL, SENTENCE_PIECE, WITH_MERGES = "gpt2", "llama", "gemma4"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of tokenizer.ggml.token_type."""
SPACE = "▁"
END_KEYS = ("eos", "eot", "eom")
END_OF_MESSAGE = "<|end|>"
HARMONY_ENDS = frozenset({"<|return|>", "<|call|>"})
"""Of gpt-oss, whose answers have several messages."""
ENDS = HARMONY_ENDS | {
    "<|eot_id|>",
    "<|im_end|>",
    END_OF_MESSAGE,
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "<end_of_turn>",
    "<turn|>",
}
"""Control tokens that end an answer. Files name one or two, and chats may end with another."""
TEMPLATE, TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
NOT_STRIPPING = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Of Phi-3's special tokens, those that keep the spaces behind them. The file does not tell."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id, what each is, and the ids of special ones."""

    metadata: Metadata
    tokens: tuple[str, ...]
    types: tuple[int, ...]

    @classmethod
    def of(cls, metadata: Metadata) -> Vocabulary:
        """Raises ConfigurationError."""
        tokens = metadata.texts("tokenizer.ggml.tokens")
        key = "tokenizer.ggml.token_type"
        types = metadata.wholes(key) if key in metadata else (NORMAL,) * len(tokens)
        if len(types) != len(tokens):
            raise ConfigurationError(f"{metadata.path}: {key} has {len(types)} values for {len(tokens)} tokens")
        return cls(metadata, tokens, types)

    def special_id(self, name: str) -> int | None:
        """Of "bos", "eos" and others; None if the file names none."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self.metadata:
            return None
        token = self.metadata.whole(key)
        if not 0 <= token < len(self.tokens):
            raise ConfigurationError(f"{self.metadata.path}: {key} {token} is not one of {len(self.tokens)} tokens")
        return token

    def special_token(self, name: str) -> str | None:
        token = self.special_id(name)
        return None if token is None else self.tokens[token]

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end an answer."""
        named = {token for name in END_KEYS if (token := self.special_id(name)) is not None}
        typed = zip(self.tokens, self.types, strict=True)
        control = {token: number for number, (token, kind) in enumerate(typed) if kind == CONTROL and token in ENDS}
        if control.keys() >= HARMONY_ENDS:
            control.pop(END_OF_MESSAGE, None)
        return sorted(named | set(control.values()))


def tokenizer_of(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Raises ConfigurationError for kinds of vocabularies, and for divisions of texts, that are not known."""
    metadata = vocabulary.metadata
    kind = metadata.text(KIND)
    if kind == BYTE_LEVEL:
        division = _find_division(metadata)
        found = _byte_level(vocabulary, division)
        adds_bos = division.adds_bos
    elif kind in (SENTENCE_PIECE, WITH_MERGES):
        merges = _merges(vocabulary) if kind == SENTENCE_PIECE else _told_merges(vocabulary)
        found, adds_bos = _sentence_piece(vocabulary, merges, has_prefix=kind == SENTENCE_PIECE), True
    else:
        raise ConfigurationError(
            f"{metadata.path}: {KIND} {kind!r} is not supported; {BYTE_LEVEL}, {SENTENCE_PIECE} and {WITH_MERGES} are, "
            f"or {REMEDY}"
        )
    found.add_tokens(list(_added_tokens(vocabulary)))
    _add_template(found, vocabulary, adds_bos)
    return found


def tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """Special tokens and chat templates."""
    metadata = vocabulary.metadata
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    tokens = {f"{name}_token": vocabulary.special_token(key) for name, key in named.items()}
    values: dict[str, Any] = {name: token for name, token in tokens.items() if token is not None}
    values |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    names = metadata.texts(TEMPLATES) if TEMPLATES in metadata else ()
    templates = {name: metadata.text(f"{TEMPLATE}.{name}") for name in names}
    if TEMPLATE in metadata:
        templates["default"] = metadata.text(TEMPLATE)
    if templates.keys() == {"default"}:
        values["chat_template"] = templates["default"]
    elif templates:
        values["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return values


def _find_division(metadata: Metadata) -> Division:
    name = metadata.text(DIVISION, "")
    if name not in DIVISIONS:
        said = f"{DIVISION} {name!r} is not known" if name else f"the metadata has no {DIVISION}"
        raise ConfigurationError(
            f"{metadata.path}: {said}, so that texts may be given other tokens than the model learned: {REMEDY}"
        )
    return DIVISIONS[name]


def _told_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    merges = [tuple(merge.split(" ")) for merge in vocabulary.metadata.texts("tokenizer.ggml.merges")]
    pairs = [(merge[0], merge[1]) for merge in merges if len(merge) == 2]
    if len(pairs) != len(merges):
        raise ConfigurationError(f"{vocabulary.metadata.path}: tokenizer.ggml.merges are not pairs of tokens")
    return pairs


def _byte_level(vocabulary: Vocabulary, division: Division) -> tokenizers.Tokenizer:
    model = _bpe(vocabulary, _told_merges(vocabulary), ignore_merges=division.keeps_known_words)
    found = tokenizers.Tokenizer(model)
    normalizer = division.normalizer()
    if normalizer is not None:
        found.normalizer = normalizer
    found.pre_tokenizer = division.pre_tokenizer()
    found.decoder = decoders.ByteLevel()
    return found


def _sentence_piece(vocabulary: Vocabulary, merges: list[tuple[str, str]], *, has_prefix: bool) -> tokenizers.Tokenizer:
    """`has_prefix`: whether a text gets a space in front, where the file does not say it."""
    unknown = vocabulary.special_token("unknown") or next(iter(_of_type(vocabulary, UNKNOWN)), None)
    found = tokenizers.Tokenizer(_bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.metadata.flag("tokenizer.ggml.add_space_prefix", has_prefix):
        found.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        found.normalizer = spaces
    found.decoder = decoders.Sequence(parts)
    return found


def _bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    # Rows of the embedding that no token has are not in the vocabulary.
    typed = zip(vocabulary.tokens, vocabulary.types, strict=True)
    numbers = {token: number for number, (token, kind) in enumerate(typed) if kind != UNUSED}
    try:
        return models.BPE(vocab=numbers, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception
        raise ConfigurationError(
            f"{vocabulary.metadata.path}: the tokens and merges in its metadata are no vocabulary: {error}"
        ) from None


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins those neighbours that make the piece with the best score: each piece has the merges of all
    its halves that are pieces, those of better scores first."""
    key = "tokenizer.ggml.scores"
    scores = vocabulary.metadata.numbers(key)
    if len(scores) != len(vocabulary.tokens):
        raise ConfigurationError(
            f"{vocabulary.metadata.path}: {key} has {len(scores)} values for {len(vocabulary.tokens)} tokens"
        )
    numbers = {token: number for number, token in enumerate(vocabulary.tokens)}
    ranked = []
    for number, token in enumerate(vocabulary.tokens):
        if vocabulary.types[number] not in (NORMAL, USER_DEFINED):
            continue
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in numbers and right in numbers:
                ranked.append((-scores[number], number, numbers[left], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _added_tokens(vocabulary: Vocabulary) -> Iterator[AddedToken]:
    """Tokens that are found in a text before it is divided into words."""
    is_phi3 = vocabulary.metadata.text(ARCHITECTURE) == "phi3" and vocabulary.metadata.text(KIND) == SENTENCE_PIECE
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (UNKNOWN, CONTROL):
            strips = is_phi3 and token not in NOT_STRIPPING
            yield AddedToken(token, special=True, normalized=False, rstrip=strips)
        elif kind == USER_DEFINED:
            yield AddedToken(token, special=False, normalized=False)


def _add_template(found: tokenizers.Tokenizer, vocabulary: Vocabulary, adds_bos: bool) -> None:
    metadata = vocabulary.metadata
    wanted = {
        "bos": metadata.flag("tokenizer.ggml.add_bos_token", adds_bos),
        "eos": metadata.flag("tokenizer.ggml.add_eos_token", False),
    }
    before, behind = ([vocabulary.special_token(name)] if is_wanted else [] for name, is_wanted in wanted.items())
    tokens = [token for token in (*before, *behind) if token is not None]
    if tokens:
        parts = [part for part in (*before, "$A", *behind) if part is not None]
        numbers = [(token, found.token_to_id(token)) for token in tokens]
        found.post_processor = processors.TemplateProcessing(single=parts, special_tokens=numbers)


def _of_type(vocabulary: Vocabulary, wanted: int) -> Iterator[str]:
    return (token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == wanted)
