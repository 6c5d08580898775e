"""How vocabularies of byte-level BPE divide a text into words, by the names that GGUF files have for it.

A file names the division (tokenizer.ggml.pre) and does not describe it: of the wrong one a text would have other
tokens. The expressions are those of the tokenizer.json of the models that each name stands for.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REST_WITH_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED_WORDS = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*")
CASED = "|".join(CASED_WORDS)
CASED_WITH_CONTRACTIONS = "|".join(f"{word}{CONTRACTION}?" for word in CASED_WORDS)


@dataclass(frozen=True, slots=True)
class Division:
    patterns: tuple[str, ...] = ()
    """Regular expressions of words, each of which divides what the one before it made; none = GPT-2's."""
    single_digits: bool = False
    """Before GPT-2's: each digit is a word."""
    composes: bool = False
    """The text is normalised to NFC."""
    keeps_known_words: bool = False
    """A word that is in the vocabulary is one token, whatever could be merged."""
    adds_bos: bool = False
    """Where the file does not say."""

    def normalizer(self) -> Normalizer | None:
        return normalizers.NFC() if self.composes else None

    def pre_tokenizer(self) -> PreTokenizer:
        if self.patterns:
            splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
            return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if self.single_digits:
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
        return words


LLAMA3 = Division((rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{REST}",), keeps_known_words=True, adds_bos=True)
CL100K = Division((rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{REST}",))
QWEN2 = Division((rf"{CONTRACTION}|{WORD}|\p{{N}}|{REST}",), composes=True)
QWEN3_5 = Division(
    (
        rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
        rf"\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    composes=True,
)
DEEPSEEK_V3 = Division(
    (
        r"\p{N}{1,3}",
        r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
TEKKEN = Division((rf"{CASED}|\p{{N}}|{REST_WITH_SLASHES}",), keeps_known_words=True, adds_bos=True)
GPT_4O = Division((rf"{CASED_WITH_CONTRACTIONS}|\p{{N}}{{1,3}}|{REST_WITH_SLASHES}",))
GPT_2 = Division()
STARCODER = Division(single_digits=True)

DIVISIONS: dict[str, Division] = {
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "falcon3": LLAMA3,
    "falcon-h1": LLAMA3,
    "lfm2": LLAMA3,
    "dbrx": CL100K,
    "smaug-bpe": CL100K,
    "glm4": CL100K,
    "chatglm-bpe": CL100K,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "qwen35": QWEN3_5,
    "deepseek-v3": DEEPSEEK_V3,
    "tekken": TEKKEN,
    "gpt-4o": GPT_4O,
    "minimax-m2": GPT_4O,
    "gpt-2": GPT_2,
    "phi-2": GPT_2,
    "mpt": GPT_2,
    "olmo": GPT_2,
    "starcoder": STARCODER,
    "refact": STARCODER,
    "command-r": STARCODER,
    "smollm": STARCODER,
    "codeshell": STARCODER,
}
"""By tokenizer.ggml.pre."""
