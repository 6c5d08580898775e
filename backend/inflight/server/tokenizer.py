"""Text to token ids and back, from the files of a checkpoint folder.

Reads `tokenizer.json` with the tokenizers library alone: importing transformers would cost seconds of every start. It
is used only for a folder that has no such file. Knows nothing of streams: see `text_decoder` for those.
"""

from __future__ import annotations

import contextlib
import json
import reprlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers

from inflight.errors import ConfigurationError


class Tokenizer:
    """One checkpoint's tokenizer. Thread safe: it is never changed after loading."""

    def __init__(self, backend: tokenizers.Tokenizer, end_ids: list[int], bos_id: int | None = None) -> None:
        """`end_ids`: tokens that end an output unless the client says otherwise."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bos_id = bos_id
        self.end_ids = end_ids
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.is_byte_level = _is_byte_level(backend)
        self.token = cache(backend.id_to_token)

    @classmethod
    def load(cls, directory: str | Path, checkpoint: str | Path | None = None) -> Tokenizer:
        """Read the tokenizer of `directory`; end tokens also from the configuration files of `checkpoint`.

        Raises ConfigurationError naming the file that is missing or wrong.
        """
        folder = Path(directory)
        if not folder.is_dir():
            raise ConfigurationError(f"tokenizer_dir: {folder} is not a folder")
        path = folder / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_file(str(path)) if path.is_file() else _convert(folder)
        except ConfigurationError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise ConfigurationError(f"{path} cannot be read as a tokenizer: {error}") from None
        own = _read_json(folder / "tokenizer_config.json")
        end_ids = set(_special_ids(backend, own, "eos_token"))
        for name in ("generation_config.json", "config.json"):
            end_ids.update(_end_ids(Path(checkpoint or folder, name)))
        bos = _special_ids(backend, own, "bos_token")
        return cls(backend, sorted(end_ids), bos[0] if bos else None)

    def encode(self, text: str) -> list[int]:
        """Prompt -> tokens, with the special tokens that the checkpoint puts around a prompt.

        A prompt that a chat template already began with the beginning-of-text token does not get a second one.
        """
        with _panics_as_errors():
            ids: list[int] = self._backend.encode(text).ids
        if len(ids) > 1 and ids[0] == ids[1] == self._bos_id:
            return ids[1:]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Tokens of a piece of text, nothing added."""
        with _panics_as_errors():
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Tokens -> text without special tokens; bytes that are not UTF-8 become U+FFFD."""
        with _panics_as_errors():
            text: str = self._backend.decode(token_ids)
        return text


class TokenizerFailed(Exception):
    """The tokenizers library gave up on a text."""


@contextlib.contextmanager
def _panics_as_errors() -> Iterator[None]:
    """A panic in Rust arrives as a BaseException that is no Exception, which would end the thread it happens on."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerFailed("the tokenizer panicked") from None


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether every token is a string of bytes that are simply put together."""
    decoder = backend.decoder
    if decoder is None:
        return False
    state: Any = json.loads(decoder.__getstate__())
    while state.get("type") == "Sequence" and len(state.get("decoders", ())) == 1:
        state = state["decoders"][0]
    return bool(state.get("type") == "ByteLevel")


def _convert(folder: Path) -> tokenizers.Tokenizer:
    if not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "tokenizer_config.json")):
        raise ConfigurationError(f"{folder} holds no tokenizer.json and no other tokenizer file")
    from transformers import AutoTokenizer

    try:
        backend: tokenizers.Tokenizer = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    except Exception as error:
        raise ConfigurationError(f"the tokenizer in {folder} cannot be read: {error}") from None
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
