"""A GGUF file is read as the gguf package reads it; what is damaged is refused in one sentence that names the file.

Run: pytest ci/unit/gguf/test_gguf_file.py
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from inflight.errors import ConfigurationError
from inflight.gguf.file import GgufFile
from inflight.gguf.tensor_types import NOT_READ, TENSOR_TYPES

VALUES: dict[str, Any] = {"text": "ä", "texts": ["a", "", "▁b"], "whole": 7, "floats": [0.5, -2.0], "flag": True}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_string("a.text", VALUES["text"])
    writer.add_array("a.texts", VALUES["texts"])
    writer.add_uint64("a.whole", VALUES["whole"])
    writer.add_array("a.floats", VALUES["floats"])
    writer.add_bool("a.flag", VALUES["flag"])
    numbers = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    writer.add_tensor("floats", numbers)
    quantized = gguf.quants.quantize(numbers, GGMLQuantizationType.Q8_0)
    writer.add_tensor("codes", quantized, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        GgufFile(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    return message.removeprefix(str(path))


def changed(path: Path, find: bytes, replacement: bytes) -> str:
    """Why the file is refused once these bytes, which it has once, are replaced."""
    content = path.read_bytes()
    assert content.count(find) == 1
    path.write_bytes(content.replace(find, replacement))
    return refusal(path)


def test_metadata_and_tensors_are_those_that_were_written(path: Path) -> None:
    file, expected = GgufFile(path), gguf.GGUFReader(path)
    assert {key: file.metadata.values[f"a.{key}"] for key in VALUES} == {
        key: tuple(value) if isinstance(value, list) else value for key, value in VALUES.items()
    }
    for tensor in expected.tensors:
        found = file.tensors[tensor.name]
        assert found.shape == (3, 64) and found.type.name == tensor.tensor_type.name
        assert bytes(file.bytes_of(found)) == tensor.data.tobytes()
    assert len(file.tensors) == len(expected.tensors) == 2


def test_types_have_the_sizes_that_ggml_gives_them() -> None:
    expected = {kind.value: (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: (each.name, each.block_size, each.block_bytes) for number, each in TENSOR_TYPES.items()} == expected


@pytest.mark.parametrize("kind", TENSOR_TYPES.values(), ids=lambda kind: kind.name)
def test_a_type_is_read_if_gguf_has_its_numbers(kind: Any) -> None:
    row = np.zeros((1, kind.block_bytes), np.uint8)
    if kind.name in NOT_READ:
        with pytest.raises(NotImplementedError):
            gguf.quants.dequantize(row, GGMLQuantizationType[kind.name])
    else:
        assert gguf.quants.dequantize(row, GGMLQuantizationType[kind.name]).shape == (1, kind.block_size)


def test_values_are_asked_for_by_type(path: Path) -> None:
    metadata = GgufFile(path).metadata
    for ask in (metadata.text, metadata.whole, metadata.flag, metadata.numbers):
        with pytest.raises(ConfigurationError, match=r"x\.gguf: a\.texts must be .*, got \('a', '', '▁b'\)"):
            ask("a.texts")
    with pytest.raises(ConfigurationError, match=r"x\.gguf has no a\.b in its metadata"):
        metadata.whole("a.b")


def test_a_file_that_ends_anywhere_is_refused(path: Path) -> None:
    content = path.read_bytes()
    # The last tensor is padded.
    for size in (*range(1, len(content) - 64, 37), len(content) - 33):
        path.write_bytes(content[:size])
        refusal(path)


@pytest.mark.parametrize(
    ("find", "replacement", "sentence"),
    [
        (b"GGUF", b"GGML", r" is not a GGUF file: it begins with b'GGML', not with b'GGUF'"),
        (b"GGUF\3\0\0\0", b"GGUF\1\0\0\0", r" is GGUF of version 1; versions 2 and 3, little endian, are supported"),
        (b"GGUF\3\0\0\0", b"GGUF\0\0\0\3", r" is GGUF of version 50331648; versions"),
        (
            b"GGUF\3\0\0\0\2",
            b"GGUF\3\0\0\0\2\0\0\0\0\0\0\xff" + b"\xff",
            r" is not a whole GGUF file \(.* values in its metadata would go beyond its \d+ bytes\): download it again",
        ),
        (b"a.texts\x09\0\0\0\x08\0\0\0\3\0", b"a.texts\x09\0\0\0\x08\0\0\0\3\x7f", r".*the 32515 elements of"),
        (b"a.floats\x09\0\0\0\6\0\0\0\2\0\0\0\0", b"a.floats\x09\0\0\0\6\0\0\0\2\0\0\0\1", r".*4294967298 elements"),
        (b"a.floats\x09\0\0\0\6", b"a.floats\x09\0\0\0\x09", r".*'a\.floats' is a list of type 9\)"),
        (b"a.flag\7", b"a.flag\x17", r".*'a\.flag' is of type 23\)"),
        (b"a.text\x08", b"a.flag\x08", r".*its metadata has 'a\.flag' twice\)"),
        (b"codes\2\0\0\0", b"codes\5\0\0\0", r".*its tensor 'codes' has 5 dimensions\)"),
        (b"codes\2\0\0\0\x40", b"codes\2\0\0\0\x41", r".*has shape \[3, 65\], and Q8_0 has whole blocks of 32\)"),
        (b"codes\2\0\0\0\x40\0\0\0\0\0\0\0\3", b"codes\2\0\0\0\x40\0\0\0\0\0\0\0\7", r".*'codes' ends at byte"),
        (b"\x08\0\0\0" + struct.pack("<Q", 768), b"\x63\0\0\0" + struct.pack("<Q", 768), r": tensor 'codes' is of"),
        (b"\x08\0\0\0" + struct.pack("<Q", 768), b"\x08\0\0\0" + struct.pack("<Q", 769), r".*begins at 769"),
    ],
)
def test_a_length_that_cannot_be_is_refused(path: Path, find: bytes, replacement: bytes, sentence: str) -> None:
    assert re.match(sentence, changed(path, find, replacement))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refusal(tmp_path / "nowhere.gguf")
    assert "is not a GGUF file" in refusal(tmp_path)
    (tmp_path / "empty.gguf").touch()
    assert "is not a GGUF file: it cannot be mapped, or is empty" in refusal(tmp_path / "empty.gguf")
