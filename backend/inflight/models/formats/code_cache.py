"""Codes that were made of a checkpoint's floats, kept between starts, so that the next one reads them.

A file has what one rank made while it loaded a network: tiles, which are rows and columns of the checkpoint's weights.
A rank takes its parts from whatever files have them, so that more or fewer ranks find the codes of others wherever
their groups of inputs are the same. A file gets its name once it is whole, and is never changed. Each tile has a
checksum: where it does not match, the file is removed and the codes are made anew.

Knows neither formats nor layers. Legend: O output features, I input features, G groups of inputs.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inflight.cache_folder import cache_folder
from inflight.models.checkpoint import Checkpoint
from inflight_kernels import Code, CodedWeight
from inflight_kernels.matmul import coded_weight

logger = logging.getLogger(__name__)

FOLDER = "quantised"
MADE_BY = (Path(__file__).with_name("on_load.py"), Path(coded_weight.__file__))
"""The code on which codes depend."""
LEAST_BYTES = 2**24
"""Of what is kept: fewer codes are made within a second."""
ROOM_BYTES = 2**30
"""Of the disk, which are left to others."""
UNUSED_SECONDS = 30 * 86400.0
"""After which a file is removed when another one is written."""
DTYPES = {torch.float16: "F16", torch.uint8: "U8"}
"""As safetensors names them."""
SAMPLES, SAMPLE_BYTES = 256, 4096
"""Of each file of a checkpoint that are read, beside its size and its time of change, which copies and builds may have
set alike for different trainings."""


class Tile(msgspec.Struct, frozen=True):
    """Rows and columns of a weight, from the first to behind the last, and what codes they become."""

    name: str
    outputs: tuple[int, int]
    inputs: tuple[int, int]
    code: str
    group_size: int

    def overlap(self, other: Tile) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """The outputs and inputs that both have; None if there are none, or if their codes are not the same."""
        if (self.name, self.code, self.group_size) != (other.name, other.code, other.group_size):
            return None
        # Groups begin with the first input of a tile.
        if self.inputs != other.inputs and any(edge % self.group_size for edge in (*self.inputs, *other.inputs)):
            return None
        outputs, inputs = _common(self.outputs, other.outputs), _common(self.inputs, other.inputs)
        return None if outputs[0] >= outputs[1] or inputs[0] >= inputs[1] else (outputs, inputs)

    def part(self, weight: CodedWeight, outputs: tuple[int, int], inputs: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Codes and scales of these features of the weight (O, I) that is this tile: views."""
        rows = slice(outputs[0] - self.outputs[0], outputs[1] - self.outputs[0])
        first, end = inputs[0] - self.inputs[0], inputs[1] - self.inputs[0]
        columns = slice(first * weight.code.bits // 8, end * weight.code.bits // 8)
        groups = slice(first // self.group_size, -(-end // self.group_size))
        return weight.codes[rows, columns], weight.scales[rows, groups]


class _Stored(msgspec.Struct, frozen=True):
    """A tile of a file, whose tensors are called by its place there."""

    tile: Tile
    checksum: int


class _Place(NamedTuple):
    """Where a tile is."""

    path: Path
    file: Any
    number: int
    stored: _Stored


class CodeCache:
    """Of one rank, while it loads one network."""

    def __init__(self, checkpoint: Checkpoint, code: Code, dtype: torch.dtype) -> None:
        """`code`: of most layers. `dtype`: of the activations, in which a head is before it becomes codes."""
        self._checkpoint = checkpoint
        self._code = code
        self._began = time.monotonic()
        self._folder: Path | None = None
        self._places: defaultdict[str, list[_Place]] = defaultdict(list)
        """By the names of weights."""
        self._weights: dict[Tile, CodedWeight] = {}
        """All that this rank asked for."""
        self._made = False
        try:
            self._folder = cache_folder(FOLDER) / f"{code.value}-{_identity(checkpoint, dtype)}"
            for path in sorted(self._folder.glob("*.safetensors")):
                self._open(path)
        except OSError as error:
            logger.warning("quantised weights are not kept: %s", error)

    def read(self, tile: Tile, weight: CodedWeight) -> bool:
        """Whether files have the whole tile, which `weight` then holds; else its values are undefined. It is what the
        tile becomes, and is kept until the network is loaded."""
        self._weights[tile] = weight
        missing = torch.ones(weight.scales.shape, dtype=torch.bool)
        for place in sorted(self._places[tile.name], key=lambda place: place.stored.tile != tile):
            common = tile.overlap(place.stored.tile)
            if common is None or not missing.any():
                continue
            found = self._load(place, weight)
            if found is not None:
                for target, source in zip(
                    tile.part(weight, *common), place.stored.tile.part(found, *common), strict=True
                ):
                    target.copy_(source)
                tile.part(weight._replace(scales=missing), *common)[1].fill_(False)
        if missing.any():
            self._made = True
            self._checkpoint.is_quantised_to(self._code.value)
        return not missing.any()

    def finish(self) -> None:
        """Keep what was made, if not all was read. Serves without, where that is impossible."""
        seconds, code, folder = time.monotonic() - self._began, self._code.value, self._folder
        if not self._made:
            logger.info("quantised weights are read from %s", folder)
            return
        # What has two bytes is before what has one, so that its places are even.
        tensors = {_scales(number): weight.scales for number, weight in enumerate(self._weights.values())}
        tensors |= {_codes(number): weight.codes for number, weight in enumerate(self._weights.values())}
        num_bytes, path = sum(tensor.nbytes for tensor in tensors.values()), None
        if folder is not None and num_bytes >= LEAST_BYTES:
            try:
                path = self._write(folder, tensors, num_bytes)
            except OSError as error:
                logger.warning(
                    "quantised weights are not kept, and are made anew at the next start: %s; INFLIGHT_CACHE_DIR may "
                    "name a folder with room for %.0f MB",
                    error,
                    num_bytes / 1e6,
                )
        if path is None:
            logger.info("quantised to %s in %.1f s", code, seconds)
        else:
            logger.info("quantised to %s in %.1f s, kept in %s (%.0f MB)", code, seconds, path, num_bytes / 1e6)

    def _write(self, folder: Path, tensors: dict[str, Tensor], num_bytes: int) -> Path:
        """Raises OSError."""
        _remove_unused(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        room = shutil.disk_usage(folder).free - ROOM_BYTES
        if room < num_bytes:
            raise OSError(f"{folder} has room for {max(room, 0) / 1e6:.0f} MB")
        tiles = [_Stored(tile, _checksum(tile, weight)) for tile, weight in self._weights.items()]
        path = folder / _file_name(self._weights)
        descriptor, scratch = tempfile.mkstemp(dir=folder, suffix=".part")
        os.close(descriptor)
        try:
            _write_file(scratch, tensors, {"tiles": msgspec.json.encode(tiles).decode()})
            # Whoever writes the same at once replaces an equal file.
            os.replace(scratch, path)
        finally:
            Path(scratch).unlink(missing_ok=True)
        return path

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(str(path), framework="pt")
            metadata: dict[str, str] = file.metadata() or {}  # type: ignore[no-untyped-call]
            tiles = msgspec.json.decode(metadata.get("tiles", ""), type=list[_Stored])
            if path.name != _file_name(stored.tile for stored in tiles):
                raise ValueError("it has other tiles than its name says")
        except FileNotFoundError:
            return
        except (SafetensorError, msgspec.DecodeError, ValueError) as error:
            self._remove(path, str(error))
            return
        with suppress(OSError):
            os.utime(path)
        for number, stored in enumerate(tiles):
            self._places[stored.tile.name].append(_Place(path, file, number, stored))

    def _load(self, place: _Place, like: CodedWeight) -> CodedWeight | None:
        """The whole tile of a file, for a weight that is coded `like` this; None if it is damaged."""
        try:
            codes, scales = (place.file.get_tensor(name(place.number)) for name in (_codes, _scales))
            found = like._replace(codes=codes, scales=scales)
            if _checksum(place.stored.tile, found) == place.stored.checksum:
                return found
            reason = f"{place.stored.tile.name} has another checksum"
        except SafetensorError as error:
            reason = str(error)
        self._remove(place.path, reason)
        return None

    def _remove(self, path: Path, reason: str) -> None:
        logger.warning("%s is damaged and removed, and its weights are quantised anew: %s", path, reason)
        for places in self._places.values():
            places[:] = [place for place in places if place.path != path]
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _identity(checkpoint: Checkpoint, dtype: torch.dtype) -> str:
    """Of all on which codes depend: the checkpoint's weights, the code that makes them, and by what torch adds up."""
    decisive = (str(dtype), str(torch.__version__), torch.backends.cpu.get_cpu_capability())
    digest = hashlib.blake2b(repr(decisive).encode(), digest_size=16)
    for source in MADE_BY:
        digest.update(source.read_bytes())
    for path in checkpoint.paths:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            digest.update(f"{path.name} {found.st_size} {found.st_mtime_ns} ".encode())
            last = max(found.st_size - SAMPLE_BYTES, 0)
            for number in range(SAMPLES):
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, last * number // (SAMPLES - 1)))
    return digest.hexdigest()


def _file_name(tiles: Iterable[Tile]) -> str:
    """Of the file that has them."""
    return f"{hashlib.blake2b(msgspec.json.encode(list(tiles)), digest_size=16).hexdigest()}.safetensors"


def _checksum(tile: Tile, weight: CodedWeight) -> int:
    """Of a tile's place, too: a damaged head must not put it elsewhere."""
    found = zlib.crc32(msgspec.json.encode(tile))
    for tensor in (weight.codes, weight.scales):
        found = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode(), found)
        found = zlib.crc32(_bytes(tensor), found)
    return found


def _write_file(path: str, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """As safetensors' own `save_file` does, which makes copies or views of tensors that cannot be freed afterwards."""
    head: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        head[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = msgspec.json.encode(head)
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(_bytes(tensor))


def _bytes(tensor: Tensor) -> ctypes.Array[ctypes.c_ubyte]:
    """Its memory: what torch shows of it by itself makes a storage that nobody can free. It must be contiguous."""
    assert tensor.is_contiguous()
    return (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())


def _remove_unused(folder: Path) -> None:
    """What nobody has read for long, and what was left of writers that were killed."""
    oldest = time.time() - UNUSED_SECONDS
    for path in folder.glob("*/*"):
        with suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()
                path.parent.rmdir()


def _common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])


def _codes(number: int) -> str:
    return f"{number}.codes"


def _scales(number: int) -> str:
    return f"{number}.scales"
