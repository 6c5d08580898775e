"""Reads numpy arrays from tritonserver into Python values. An invalid one raises InvalidRequest with one sentence.

tritonserver has already checked dtype and rank; a leading batch dimension of 1 is ignored. No message repeats text that
the client sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.context_phase import MAX_PARAMS_BYTES
from inflight.errors import InvalidRequest
from inflight.prompt_tuning import EmbeddingTable
from inflight.sampling_config import MAX_BIASED_TOKENS

Array = NDArray[Any]
Value = (
    bool | int | float | str | bytes | list[int] | list[float] | list[str] | list[list[int]] | EmbeddingTable | Array
)

MAX_WORDS = 1024
"""Entries of one list of words: stop, bad or biased ones."""
MAX_WORDS_BYTES = 16_384
"""Bytes of such a list: the memory of an automaton of stop words, and the time to tokenise the others, grow with it."""
MAX_WORDS_TOKENS = 32_768
"""Tokens of such a list."""
MAX_TEXTS = 1024
"""Of a request, each of which is read by itself: as many as of one body of /v1/embeddings."""
MAX_IMAGE_TEXT_BYTES = 2**30
"""Of one image in base64: above what any engine takes of its file."""
MAX_MATRIX_BYTES = 2**26
"""A request that has more does not fit into a message to the engine."""
MAX_BATCH_BYTES = 2**26
"""Of all tensors of a request of several prompts: reading them delays the requests behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """Sizes above which a tensor is refused unread: reading it would delay the requests behind it."""

    max_text_bytes: int
    max_input_len: int
    """Tokens of a prompt."""
    vocab_size: int
    """Entries of a row that has one for each token."""
    max_bytes_per_token: int | None = None
    """Bytes of a prompt's text that one token stands for at most; None = unknown."""
    max_prompt_embedding_bytes: int = 2**25
    max_resume_token_bytes: int = 2**25


def read_scalar(name: str, array: Array, limits: ReadLimits) -> Value:
    """The single value of a tensor: bool, int, finite float or text."""
    if array.size != 1:
        raise InvalidRequest(f"{name} must hold exactly one value, got shape {list(array.shape)}")
    value = array.reshape(-1)[0]
    if isinstance(value, bytes | str):
        return _text(name, value, limits.max_text_bytes)
    plain: Value = value.item()
    if isinstance(plain, float) and not math.isfinite(plain):
        raise InvalidRequest(f"{name} must be a finite number, got {plain}")
    return plain


def read_seed(name: str, array: Array, limits: ReadLimits) -> Value:
    """A seed of any integer type. Negative ones are the unsigned numbers with the same bits."""
    value = read_scalar(name, array, limits)
    if not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number")
    return value % 2**64


def read_above_zero(name: str, array: Array, limits: ReadLimits) -> Value | None:
    """A number; 0 and less count as not given."""
    value = read_scalar(name, array, limits)
    return value if isinstance(value, int | float) and value > 0 else None


def read_prompt(name: str, array: Array, limits: ReadLimits) -> Value:
    """A text that is to be tokenised. One that must exceed max_input_len is refused here, because tokenising it would
    take long."""
    texts = [value for value in array.reshape(-1)[:1] if isinstance(value, bytes)]
    if texts and limits.max_bytes_per_token is not None:
        most, size = limits.max_bytes_per_token * limits.max_input_len, len(texts[0])
        if most < size <= limits.max_text_bytes:
            raise InvalidRequest(
                f"the prompt has {size} bytes, which make more than max_input_len {limits.max_input_len} tokens"
            )
    return read_scalar(name, array, limits)


def read_resume_token(name: str, array: Array, limits: ReadLimits) -> Value:
    """A single text, which may be longer than others."""
    return read_scalar(name, array, replace(limits, max_text_bytes=limits.max_resume_token_bytes))


def read_bytes(name: str, array: Array, limits: ReadLimits) -> Value | None:
    """Opaque bytes; none at all counts as not given."""
    _check_row(name, array, MAX_PARAMS_BYTES)
    if array.dtype != np.uint8:
        raise InvalidRequest(f"{name} must be bytes, of the type UINT8")
    return array.tobytes() or None


def read_token_ids(name: str, array: Array, limits: ReadLimits) -> Value:
    """One row of token ids, shape [n] or [1, n]."""
    if array.ndim > 1 and math.prod(array.shape[:-1]) != 1:
        raise InvalidRequest(f"{name} must be one row of token ids, got shape {list(array.shape)}")
    if array.size > limits.max_input_len:
        raise InvalidRequest(f"the prompt has {array.size} tokens, more than max_input_len {limits.max_input_len}")
    ids: list[int] = array.reshape(-1).tolist()
    return ids


def read_drafts(name: str, array: Array, limits: ReadLimits) -> Value:
    """One row of token ids, shape [n] or [1, n], which may be empty."""
    _check_row(name, array, limits.max_input_len)
    ids: list[int] = array.reshape(-1).tolist()
    return ids


def read_words(name: str, array: Array, limits: ReadLimits) -> Value:
    """A list of texts, shape [n] or [1, n]. Empty texts are dropped: clients send [""] for an empty list."""
    return [text for text in _words(name, array) if text]


def read_texts(name: str, array: Array, limits: ReadLimits) -> Value:
    """A list of texts as they are, shape [n] or [1, n]: another tensor's entries belong to them, one by one."""
    _check_row(name, array, None)
    return _words(name, array)


def read_passages(name: str, array: Array, limits: ReadLimits) -> Value:
    """Texts that are read each by itself, shape [n] or [1, n]."""
    _check_row(name, array, MAX_TEXTS)
    return [_text(name, value, limits.max_text_bytes) for value in array.reshape(-1)]


def read_images(name: str, array: Array, limits: ReadLimits) -> Value | None:
    """Files in base64, shape [n] or [1, n]; none, or empty ones alone, count as not given. What they are is checked
    where waiting for it holds up no other request."""
    _check_row(name, array, MAX_TEXTS)
    files = [value for value in array.reshape(-1) if value]
    return [_text(name, value, MAX_IMAGE_TEXT_BYTES) for value in files] or None


def read_numbers(name: str, array: Array, limits: ReadLimits) -> Value:
    """A short list of numbers, shape [n] or [1, n]."""
    _check_row(name, array, MAX_BIASED_TOKENS)
    numbers: list[float] = array.reshape(-1).tolist()
    return numbers


def read_float32_bytes(name: str, array: Array, limits: ReadLimits) -> Value:
    """One row of float32, one for each token of the vocabulary, shape [n] or [1, n], as little-endian bytes; an empty
    tensor asks for nothing."""
    _check_row(name, array, limits.vocab_size)
    return array.astype("<f4", copy=False).tobytes()


def read_embeddings(name: str, array: Array, limits: ReadLimits) -> Value:
    """Rows of float16 or float32, shape [n, features] or [1, n, features]."""
    if array.nbytes > limits.max_prompt_embedding_bytes:
        raise InvalidRequest(
            f"{name} has {array.nbytes} bytes, more than max_prompt_embedding_bytes {limits.max_prompt_embedding_bytes}"
        )
    if array.ndim < 2 or math.prod(array.shape[:-2]) != 1:
        raise InvalidRequest(f"{name} must have shape [rows, features], got {list(array.shape)}")
    return EmbeddingTable.of(array.reshape(array.shape[-2:]))


def read_prompt_ids(name: str, array: Array, limits: ReadLimits) -> Value:
    """One number for each token of a prompt, or a single one, shape [n] or [1, n]."""
    _check_row(name, array, limits.max_input_len)
    numbers: list[int] = array.reshape(-1).tolist()
    return numbers


def read_matrix(name: str, array: Array, limits: ReadLimits) -> Value:
    """Rows of numbers, shape [rows, n] or [1, rows, n], as they are."""
    if array.ndim < 2 or math.prod(array.shape[:-2]) != 1:
        raise InvalidRequest(f"{name} must have two dimensions, got shape {list(array.shape)}")
    if array.nbytes > MAX_MATRIX_BYTES:
        raise InvalidRequest(f"{name} has {array.nbytes} bytes, more than {MAX_MATRIX_BYTES}")
    matrix: Array = array.reshape(array.shape[-2:])
    return matrix


def _words(name: str, array: Array) -> list[str]:
    if array.size > MAX_WORDS:
        raise InvalidRequest(f"{name} has {array.size} entries, more than {MAX_WORDS}")
    raw = [word if isinstance(word, bytes) else str(word).encode() for word in array.reshape(-1)]
    total = sum(map(len, raw))
    if total > MAX_WORDS_BYTES:
        raise InvalidRequest(f"{name} holds {total} bytes, more than {MAX_WORDS_BYTES}")
    return [_text(name, word, MAX_WORDS_BYTES) for word in raw]


def _check_row(name: str, array: Array, most: int | None) -> None:
    if array.ndim > 1 and math.prod(array.shape[:-1]) != 1:
        raise InvalidRequest(f"{name} must be one row, got shape {list(array.shape)}")
    if most is not None and array.size > most:
        raise InvalidRequest(f"{name} has {array.size} entries, more than {most}")


def read_word_ids(name: str, array: Array, limits: ReadLimits) -> Value:
    """TensorRT-LLM's word list, shape [2, n] or [1, 2, n]: row 0 holds the tokens of all words one after the other,
    row 1 the end offset of each word, padded with -1."""
    if array.ndim < 2 or array.shape[-2] != 2 or math.prod(array.shape[:-2]) != 1:
        raise InvalidRequest(f"{name} must have shape [2, n]: tokens and end offsets, got {list(array.shape)}")
    if array.shape[-1] > MAX_WORDS_TOKENS:
        raise InvalidRequest(f"{name} has {array.shape[-1]} tokens, more than {MAX_WORDS_TOKENS}")
    tokens, ends = array.reshape(2, -1).tolist()
    words: list[list[int]] = []
    start = 0
    for end in ends:
        if end == -1:
            break
        if not start < end <= len(tokens):
            raise InvalidRequest(f"{name} must have rising end offsets up to {len(tokens)}, got {end} after {start}")
        words.append(tokens[start:end])
        start = end
    if len(words) > MAX_WORDS:
        raise InvalidRequest(f"{name} has {len(words)} entries, more than {MAX_WORDS}")
    return words


def _text(name: str, value: bytes | str, max_bytes: int) -> str:
    raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    if len(raw) > max_bytes:
        raise InvalidRequest(f"{name} has {len(raw)} bytes, more than {max_bytes}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not valid UTF-8 at byte {error.start}") from None


def split(arrays: Mapping[str, Array]) -> Sequence[Mapping[str, Array]]:
    """The tensors of each prompt of a request whose tensors have a batch dimension, which is 1 in each of them. Raises
    InvalidRequest."""
    num_prompts = max((len(array) for array in arrays.values() if array.ndim), default=0)
    if num_prompts <= 1:
        return (arrays,)
    for name, array in arrays.items():
        if array.ndim == 0 or len(array) != num_prompts:
            raise InvalidRequest(f"{name} has shape {list(array.shape)}, but the request has {num_prompts} prompts")
    num_bytes = sum(map(_num_bytes, arrays.values()))
    if num_bytes > MAX_BATCH_BYTES:
        raise InvalidRequest(
            f"the {num_prompts} prompts of the request have {num_bytes} bytes, more than {MAX_BATCH_BYTES}: "
            "send fewer at once"
        )
    return [{name: array[row : row + 1] for name, array in arrays.items()} for row in range(num_prompts)]


def _num_bytes(array: Array) -> int:
    return sum(map(len, array.reshape(-1))) if array.dtype == np.object_ else array.nbytes


def to_array(value: object, numpy_type: type, rank: int) -> Array:
    """A value as a tensor of one sequence: shape (1, ..., 1, n) with `rank` dimensions. Text becomes UTF-8 bytes;
    an array keeps its own dimensions as the last ones."""
    if isinstance(value, np.ndarray):
        return value.astype(numpy_type, copy=False).reshape((1,) * (rank - value.ndim) + value.shape)
    if isinstance(value, str):
        value, numpy_type = [value], np.object_
    if numpy_type is np.object_ and isinstance(value, list):
        value = [text.encode("utf-8", "replace") for text in value]
    return np.array(value, dtype=numpy_type).reshape((1,) * (rank - 1) + (-1,))


def stack(arrays: Sequence[Array]) -> Array:
    """Arrays of the same rank >= 1, their rows one below the other. Shorter rows are padded at their ends: with -1, as
    TensorRT-LLM pads beams, where they hold signed numbers, with empty texts, and with 0 otherwise."""
    inner = [max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays), strict=True)]
    padding = {"i": -1, "f": -1, "O": b""}.get(arrays[0].dtype.kind, 0)
    stacked = np.full((sum(map(len, arrays)), *inner), padding, dtype=arrays[0].dtype)
    start = 0
    for array in arrays:
        place = (slice(start, start + len(array)), *map(slice, array.shape[1:]))
        stacked[place] = array
        start += len(array)
    return stacked


def gather(responses: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The outputs of several prompts, each with a batch dimension of 1, as those of one batch. An output that some lack
    has a row of padding for these."""
    first: dict[str, Array] = {}
    for response in responses:
        first = {**response, **first}
    return {
        name: stack([response.get(name, _nothing(array)) for response in responses]) for name, array in first.items()
    }


def _nothing(like: Array) -> Array:
    """One row without values, which `stack` pads."""
    return np.empty((1, *(0,) * (like.ndim - 1)), dtype=like.dtype)
