"""Text to token ids and back, from the files of a checkpoint folder.

Reads `tokenizer.json` with the tokenizers library alone, because importing transformers takes seconds at every start.
transformers is used only for a folder without such a file. Knows nothing of streams: see `text_decoder` for those.
"""

from __future__ import annotations

import contextlib
import json
import reprlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers

from inflight.checkpoint_files import check_files
from inflight.errors import ConfigurationError
from inflight.text.byte_tokens import ByteFallback, ByteLevel, ByteTokens, NoBytes
from inflight.text.token_bytes import max_bytes_per_token


class Tokenizer:
    """One checkpoint's tokenizer. Thread safe: it is never changed after loading."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        end_ids: list[int],
        bos_id: int | None = None,
        eos_id: int | None = None,
        pad_id: int | None = None,
    ) -> None:
        """`end_ids`: tokens that end an output unless the client sets end_id. `bos_id`, `eos_id`, `pad_id`: the
        tokenizer's own tokens for the beginning and the end of a text, and for padding."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bos_id = bos_id
        self.end_ids = end_ids
        self.eos_id = eos_id if eos_id is not None else min(end_ids, default=None)
        """One of them: the tokenizer's own."""
        self.pad_id = pad_id
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        kinds = _decoder_kinds(backend)
        self.is_byte_level = kinds == ["ByteLevel"]
        """Whether the text is the concatenation of the tokens' bytes."""
        self.byte_tokens = _byte_tokens(kinds)
        self.token = cache(backend.id_to_token)
        self.whole_text = cache(self._whole_text)
        """The text of a byte-level token whose bytes are whole characters, None for others."""
        self.max_bytes_per_token = max_bytes_per_token(backend)
        """The most bytes of a prompt that one token can stand for; None = unknown."""
        self._decoder = backend.decoder

    @classmethod
    def load(cls, directory: str | Path, checkpoint: str | Path | None = None) -> Tokenizer:
        """Read the tokenizer in `directory`. End tokens are also read from the configuration files of `checkpoint`,
        the checkpoint's folder (None = `directory`).

        Raises ConfigurationError, which names the file that is missing or invalid.
        """
        folder = Path(directory)
        if not folder.is_dir():
            raise ConfigurationError(f"tokenizer_dir: {folder} is not a folder")
        check_files(folder)
        path = folder / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_file(str(path)) if path.is_file() else _convert(folder)
        except ConfigurationError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise ConfigurationError(f"{path} cannot be read as a tokenizer: {error}") from None
        own = _read_json(folder / "tokenizer_config.json")
        eos = _special_ids(backend, own, "eos_token")
        end_ids = set(eos)
        for name in ("generation_config.json", "config.json"):
            end_ids.update(_end_ids(Path(checkpoint or folder, name)))
        bos, pad = (_special_ids(backend, own, key) for key in ("bos_token", "pad_token"))
        return cls(backend, sorted(end_ids), *(next(iter(ids), None) for ids in (bos, eos, pad)))

    def encode(self, text: str) -> list[int]:
        """Prompt -> tokens, with the special tokens that the checkpoint adds to a prompt.

        A prompt that already begins with the beginning-of-text token, from a chat template, does not get a second one.
        """
        ids = self._encode(text, add_special_tokens=True)
        if len(ids) > 1 and ids[0] == ids[1] == self._bos_id:
            return ids[1:]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Tokens of a piece of text, without added special tokens."""
        return self._encode(text, add_special_tokens=False)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Tokens of two texts with the special tokens around them, and the place of the first one that the tokenizer
        counts to the second text; 0 = it does not tell them apart."""
        with _panics_as_errors():
            encoding = self._backend.encode_batch_fast([(first, second)])[0]
        types: list[int] = encoding.type_ids
        return encoding.ids, types.index(1) if 1 in types else 0

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with _panics_as_errors():
            # A batch of one, because `encode` holds the GIL until it ends: a megabyte of text would stop all threads.
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def end_ids_below(self, vocab_size: int) -> list[int]:
        """The end tokens that can be sampled: some checkpoints name one that their vocabulary does not reach."""
        return [token for token in self.end_ids if token < vocab_size]

    def encode_spellings(self, words: Iterable[str]) -> list[list[int]]:
        """Each word as it stands at the start of a text and after a space, which are different tokens; each once."""
        words = list(words)
        spellings = [*words, *(f" {word.lstrip()}" for word in words if word.strip())]
        encoded = (tuple(self.encode_plain(spelling)) for spelling in spellings)
        return [list(word) for word in dict.fromkeys(encoded) if word]

    def _whole_text(self, token_id: int) -> str | None:
        try:
            return ByteLevel().read(self.token(token_id) or "").decode()
        except UnicodeDecodeError:
            return None

    def join(self, tokens: list[str]) -> str:
        """Decode tokens, given as the vocabulary writes them. Bytes that are not UTF-8 become U+FFFD."""
        if self._decoder is None:
            return " ".join(tokens)
        with _panics_as_errors():
            text: str = self._decoder.decode(tokens)
        return text


class TokenizerFailed(Exception):
    """The tokenizers library panicked on a text."""


@contextlib.contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Raise TokenizerFailed for a panic in Rust, which arrives as a BaseException and would end the thread."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerFailed("the tokenizer panicked") from None


def _decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    """Types of the decoder's parts, in order."""
    return [] if backend.decoder is None else _flatten(json.loads(backend.decoder.__getstate__()))


def _flatten(part: dict[str, Any]) -> list[str]:
    if part["type"] != "Sequence":
        return [part["type"]]
    return [kind for inner in part["decoders"] for kind in _flatten(inner)]


def _byte_tokens(kinds: list[str]) -> ByteTokens:
    if "ByteFallback" in kinds:
        return ByteFallback()
    return ByteLevel() if "ByteLevel" in kinds else NoBytes()


def _convert(folder: Path) -> tokenizers.Tokenizer:
    if not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "tokenizer_config.json")):
        raise ConfigurationError(f"{folder} holds no tokenizer.json and no other tokenizer file")
    from transformers import AutoTokenizer

    try:
        backend: tokenizers.Tokenizer = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"the tokenizer in {folder} cannot be read: {reason}") from None
    return backend


def _special_ids(backend: tokenizers.Tokenizer, config: dict[str, Any], key: str) -> list[int]:
    token = config.get(key)
    content = token.get("content") if isinstance(token, dict) else token
    found = backend.token_to_id(content) if isinstance(content, str) else None
    return [] if found is None else [found]


def _end_ids(path: Path) -> list[int]:
    value = _read_json(path).get("eos_token_id")
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise ConfigurationError(
            f"{path}: eos_token_id must be a token id or a list of them, got {reprlib.repr(value)}"
        )
    return ids


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ConfigurationError(f"{path} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}
