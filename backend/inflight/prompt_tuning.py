"""Embeddings that a request brings itself, for tokens that the network's own table has no row for: immutable values.

Soft prompts, features of another network, or embeddings of the whole prompt: the prompt's token ids from the size of
the vocabulary on are rows of the request's table. Knows no network. Numbers are raw bytes: lists of so many would take
the loop seconds to decode.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from inflight.errors import InvalidRequest

Array = npt.NDArray[Any]
EmbeddingType = Literal["float32", "float16", "bfloat16"]

_BITS: dict[str, tuple[str, int, int]] = {
    "float32": ("<u4", 0x7FFFFFFF, 0x7F800000),
    "float16": ("<u2", 0x7FFF, 0x7C00),
    "bfloat16": ("<u2", 0x7FFF, 0x7F80),
}
"""Of each type: its bits as a numpy type, all but the sign, and infinity. Bits from infinity on are infinity or NaN."""
_PIECE = 2**16
"""Numbers checked at a time, so that the temporary results stay in the processor's cache."""


class EmbeddingTable(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of embeddings. They stand in the place of rows of the network's own table: what the network does with those
    (scaling, positions) it does with these, as with the `inputs_embeds` of transformers."""

    dtype: EmbeddingType
    shape: tuple[int, int]
    """Rows, and features of each."""
    data: bytes
    """Row by row, little-endian."""

    @classmethod
    def of(cls, rows: npt.ArrayLike) -> EmbeddingTable:
        """Of anything that numpy reads as two-dimensional float16 or float32, also a tensor of torch on the host.

        numpy has no bfloat16: convert to float32, or give the bytes. Raises InvalidRequest.
        """
        try:
            values = np.asarray(rows)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidRequest(f"embeddings must be an array of float16 or float32: {error}") from None
        if values.dtype not in (np.float16, np.float32) or values.ndim != 2:
            raise InvalidRequest(
                "embeddings must be float16 or float32 of shape [rows, features], got "
                f"{values.dtype} of shape {list(values.shape)}"
            )
        dtype: EmbeddingType = "float16" if values.dtype == np.float16 else "float32"
        data = np.ascontiguousarray(values, f"<f{values.itemsize}").tobytes()
        return cls(dtype=dtype, shape=(values.shape[0], values.shape[1]), data=data)

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    def check_shape(self) -> None:
        """Raise InvalidRequest, with one sentence, unless it holds as many numbers as its shape says."""
        bits = _BITS[self.dtype][0]
        num_rows, num_features = self.shape
        if num_rows < 1 or num_features < 1:
            raise InvalidRequest(f"the embeddings must have at least one row and one feature, got {list(self.shape)}")
        expected = num_rows * num_features * np.dtype(bits).itemsize
        if len(self.data) != expected:
            raise InvalidRequest(
                f"the embeddings have {len(self.data)} bytes, but {list(self.shape)} of {self.dtype} take {expected}"
            )

    def validate(self) -> None:
        """The same, and unless all of them are finite."""
        self.check_shape()
        bits, magnitude, infinity = _BITS[self.dtype]
        words = np.frombuffer(self.data, bits)
        for start in range(0, len(words), _PIECE):
            if (words[start : start + _PIECE] & magnitude).max() >= infinity:
                raise InvalidRequest("the embeddings must be finite numbers, but hold infinity or NaN")

    def rows(self, indices: Array) -> Array:
        """Those of the table's rows, as float32 (indices, features), which holds every number of the three types."""
        numbers = np.frombuffer(self.data, _BITS[self.dtype][0] if self.dtype == "bfloat16" else self._numpy_type)
        chosen: Array = numbers.reshape(self.shape)[indices]
        if self.dtype == "bfloat16":
            return (chosen.astype(np.uint32) << 16).view(np.float32)
        return chosen.astype(np.float32)

    @property
    def _numpy_type(self) -> str:
        return "<f2" if self.dtype == "float16" else "<f4"


class PromptTuningConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The embeddings of a request's own tokens."""

    embedding_table: EmbeddingTable
    """Row i is the embedding of the prompt's tokens with the id `vocab_size` + i."""
    input_token_extra_ids: list[int] = []
    """One for each token of the prompt, 0 <= id < 2**64: cached prefixes are shared only between requests with equal
    ones. They are not needed to tell tables apart: requests with different tables share nothing. Empty = none."""

    def digest(self) -> bytes:
        """32 bytes that are the same for equal configurations only."""
        table = self.embedding_table
        digest = hashlib.blake2b(f"{table.dtype} {table.shape} ".encode(), digest_size=32)
        digest.update(table.data)
        digest.update(array("Q", self.input_token_extra_ids).tobytes())
        return digest.digest()


def virtual_tokens(table: EmbeddingTable, vocab_size: int) -> list[int]:
    """The token ids of all rows of a request's table, in their order."""
    return list(range(vocab_size, vocab_size + table.num_rows))
