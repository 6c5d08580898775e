"""A GGUF file: its header, its metadata, and where each tensor lies in it. Knows no architecture.

    magic, version, number of tensors, number of metadata values
    metadata    key, type, value, one after the other
    tensors     name, number of columns, rows, ..., type, start behind the header
    padding up to the alignment, then the tensors

A model may have several such files (parts.py). All numbers are little endian. A file is mapped, so that nothing of a
tensor is read before somebody wants it. Every length in it is held against what is left of the file, before anything of
that size is made.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inflight.errors import ConfigurationError
from inflight.gguf.metadata import Metadata, Value
from inflight.gguf.parts import check_parts
from inflight.gguf.tensor_types import TENSOR_TYPES, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_KEY = "general.alignment"
ALIGNMENT = 32
MAX_ELEMENTS = 2**24
"""Of a list in the metadata: above any vocabulary, below what a machine has memory for."""
MAX_DIMENSIONS = 4
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a value in the metadata -> its letter in `struct`."""
TEXT, LIST = 8, 9
"""The other types of values."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    """Rows before columns, as torch has it."""
    type: TensorType
    path: Path
    """Of the file that has it."""
    start: int
    """In that file."""
    num_bytes: int


class GgufFile:
    """Open until it is closed, and as long as somebody holds a part of it."""

    def __init__(self, path: Path, *others: Path) -> None:
        """`others`: the parts behind the first one. Raises ConfigurationError, which names the file, if one is missing,
        damaged, or of another kind."""
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        """By the names that the file has for them."""
        self._memories: dict[Path, mmap.mmap] = {}
        parts = [self._open(each) for each in (path, *others)]
        check_parts(parts, len(self.tensors))
        self.metadata = parts[0]

    def bytes_of(self, tensor: TensorInfo) -> memoryview:
        """Of one of its tensors; they are read from the disk when they are looked at."""
        return memoryview(self._memories[tensor.path])[tensor.start : tensor.start + tensor.num_bytes]

    def _open(self, path: Path) -> Metadata:
        """The file's, whose tensors are added to those of the others."""
        self._memories[path] = memory = _map(path)
        reader = _Reader(path, memory)
        num_tensors, num_values = reader.header()
        metadata = Metadata(path, reader.values(num_values))
        alignment = metadata.whole(ALIGNMENT_KEY, ALIGNMENT)
        if alignment < 1 or alignment & (alignment - 1):
            raise ConfigurationError(f"{path}: {ALIGNMENT_KEY} must be a power of two, got {alignment}")
        tensors = reader.tensors(num_tensors, alignment)
        if twice := self.tensors.keys() & tensors.keys():
            other = self.tensors[name := min(twice)].path
            raise ConfigurationError(f"{path} and {other} have the tensor {name!r} both: download them again")
        self.tensors |= tensors
        return metadata


def read_head(name: str, head: bytes) -> Metadata:
    """The metadata in the first bytes of a file of that name, as far as they go. Raises ConfigurationError if it is no
    GGUF file."""
    reader = _Reader(Path(name), head)
    _, num_values = reader.header()
    found: dict[str, Value] = {}
    with contextlib.suppress(ConfigurationError):
        for key, value in reader.each_value(num_values):
            found[key] = value
    return Metadata(Path(name), found)


def _map(path: Path) -> mmap.mmap:
    try:
        # Without waiting for a writer, should it be a FIFO.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # a folder, a device, or empty
        raise ConfigurationError(f"{path} is not a GGUF file: it cannot be mapped, or is empty") from None
    finally:
        os.close(descriptor)


class _Reader:
    """Reads a file's head from front to end."""

    def __init__(self, path: Path, memory: mmap.mmap | bytes) -> None:
        self._path = path
        self._memory = memory
        self._size = len(memory)
        self._place = 0

    def header(self) -> tuple[int, int]:
        """Numbers of tensors and of values in the metadata."""
        magic = bytes(self._memory[:4])
        if magic != MAGIC:
            raise ConfigurationError(f"{self._path} is not a GGUF file: it begins with {magic!r}, not with {MAGIC!r}")
        self._place = 4
        version = self._number("I")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise ConfigurationError(
                f"{self._path} is GGUF of version {version}; versions {known}, little endian, are supported"
            )
        return self._number("Q"), self._number("Q")

    def values(self, count: int) -> dict[str, Value]:
        found: dict[str, Value] = {}
        # A value has a length, a type and a byte at least.
        self._check_room(count * 13, f"{count} values in its metadata")
        for key, value in self.each_value(count):
            if key in found:
                raise self._damaged(f"its metadata has {key!r} twice")
            found[key] = value
        return found

    def each_value(self, count: int) -> Iterator[tuple[str, Value]]:
        for _ in range(count):
            key = self._text()
            yield key, self._value(key)

    def tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        self._check_room(count * 32, f"{count} tensors")
        heads = [self._tensor_head() for _ in range(count)]
        data = -(-self._place // alignment) * alignment
        found: dict[str, TensorInfo] = {}
        for name, shape, number, start in heads:
            if name in found:
                raise self._damaged(f"it has tensor {name!r} twice")
            found[name] = self._tensor(name, shape, number, data, start, alignment)
        return found

    def _tensor_head(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"its tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(reversed(self._numbers("Q", num_dimensions)))
        return name, shape, self._number("I"), self._number("Q")

    def _tensor(
        self, name: str, shape: tuple[int, ...], number: int, data: int, start: int, alignment: int
    ) -> TensorInfo:
        tensor_type = TENSOR_TYPES.get(number)
        if tensor_type is None:
            raise ConfigurationError(f"{self._path}: tensor {name!r} is of ggml's type {number}, which is not known")
        if shape[-1] % tensor_type.block_size or not all(shape):
            raise self._damaged(
                f"its tensor {name!r} has shape {list(shape)}, and {tensor_type.name} has whole blocks of "
                f"{tensor_type.block_size}"
            )
        if start % alignment:
            raise self._damaged(f"its tensor {name!r} begins at {start}, which is no multiple of {alignment}")
        num_bytes = math.prod(shape[:-1]) * tensor_type.row_bytes(shape[-1])
        if data + start + num_bytes > self._size:
            raise self._damaged(
                f"its tensor {name!r} ends at byte {data + start + num_bytes}, and the file at {self._size}"
            )
        return TensorInfo(name, shape, tensor_type, self._path, data + start, num_bytes)

    def _value(self, key: str) -> Value:
        kind = self._number("I")
        if kind == TEXT:
            return self._text()
        if kind != LIST:
            return self._scalar(key, kind)
        kind, length = self._number("I"), self._number("Q")
        if length > MAX_ELEMENTS:
            raise self._damaged(f"{key!r} has {length} elements")
        if kind == TEXT:
            self._check_room(length * 8, f"the {length} elements of {key!r}")
            return tuple(self._text() for _ in range(length))
        if kind not in SCALARS:
            raise self._damaged(f"{key!r} is a list of type {kind}")
        return self._numbers(SCALARS[kind], length)

    def _scalar(self, key: str, kind: int) -> int | float | bool:
        if kind not in SCALARS:
            raise self._damaged(f"{key!r} is of type {kind}")
        value: int | float | bool = self._numbers(SCALARS[kind], 1)[0]
        return value

    def _number(self, letter: str) -> int:
        return int(self._numbers(letter, 1)[0])

    def _numbers(self, letter: str, count: int) -> tuple[int, ...]:
        layout = f"<{count}{letter}"
        num_bytes = struct.calcsize(layout)
        self._check_room(num_bytes, "what its head announces")
        found: tuple[int, ...] = struct.unpack_from(layout, self._memory, self._place)
        self._place += num_bytes
        return found

    def _text(self) -> str:
        length = self._number("Q")
        self._check_room(length, f"a text of {length} bytes")
        text = self._memory[self._place : self._place + length].decode("utf-8", "replace")
        self._place += length
        return text

    def _check_room(self, num_bytes: int, what: str) -> None:
        if num_bytes > self._size - self._place:
            raise self._damaged(f"{what} would go beyond its {self._size} bytes")

    def _damaged(self, reason: str) -> ConfigurationError:
        return ConfigurationError(f"{self._path} is not a whole GGUF file ({reason}): download it again")
