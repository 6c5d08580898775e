"""A vocabulary of the size of today's models, made up: the same from the same seed, on every machine."""

from __future__ import annotations

import random

import tokenizers

from inflight.runtime.guided.vocabulary import Vocabulary

SIZE = 128_000
MAX_BYTES = 12
ONSETS = ("b", "c", "ch", "d", "f", "g", "h", "l", "m", "n", "p", "pr", "r", "s", "st", "t", "th", "tr", "v", "w", "")
VOWELS = ("a", "e", "i", "o", "u", "ea", "io", "ou", "y")
CODAS = ("", "", "n", "r", "s", "t", "l", "ng", "nd", "st", "ck", "m", "ed")
SIGNS = ('"', '":', '": ', '": "', '", "', '",', '"}', '"]', "{", '{"', "}", "},", "}}", "[", '["', "]", "],", ",", ":")
SIGNS_OF_CODE = (
    "(",
    ")",
    "();",
    "\\",
    "\\n",
    '\\"',
    "\n",
    "\n\n",
    "\t",
    " ",
    "  ",
    " = ",
    "==",
    "->",
    "/",
    "//",
    "_",
    "-",
    ".",
)
SCRIPTS = (
    (0xC0, 0x17F),
    (0x391, 0x3C9),
    (0x410, 0x44F),
    (0x5D0, 0x5EA),
    (0x3041, 0x3096),
    (0x4E00, 0x9FFF),
    (0x1F300, 0x1F64F),
)


def made_vocabulary(seed: int, size: int = SIZE) -> Vocabulary:
    """All single bytes, signs of JSON and code, numbers of up to three digits, and random pieces of 1 to 12 bytes:
    half words with a space before, others without, some beside signs or in other scripts, some cut amid a character."""
    draw = random.Random(seed)
    texts = dict.fromkeys(bytes((value,)) for value in range(256))
    texts.update(dict.fromkeys(sign.encode() for sign in (*SIGNS, *SIGNS_OF_CODE)))
    texts.update(dict.fromkeys(str(number).zfill(digits).encode() for digits in (2, 3) for number in range(10**digits)))
    while len(texts) < size:
        texts[_piece(draw)] = None
    return Vocabulary(tuple(list(texts)[:size]), tokenizers.Tokenizer(tokenizers.models.BPE()), {})


def _piece(draw: random.Random) -> bytes:
    kind = draw.random()
    if kind < 0.12:
        first, last = draw.choice(SCRIPTS)
        text = "".join(chr(draw.randint(first, last)) for _ in range(draw.randint(1, 4)))
        return text.encode()[: draw.randint(2, MAX_BYTES)]
    syllables = range(draw.randint(1, 3))
    word = "".join(draw.choice(ONSETS) + draw.choice(VOWELS) + draw.choice(CODAS) for _ in syllables)
    if kind < 0.62:
        word = " " + word
    elif kind < 0.72:
        word = word.capitalize()
    elif kind < 0.76:
        word = draw.choice(SIGNS) + word
    elif kind < 0.80:
        word += draw.choice(SIGNS)
    return word.encode()[:MAX_BYTES]
