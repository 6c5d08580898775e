"""Reads the safetensors files of a checkpoint folder: slices of tensors by name, with checks. Knows no architecture.

A rank reads only the bytes of its own slices; those for a GPU are brought there by upload.py. Nothing is unpickled.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inflight.errors import ConfigurationError
from inflight.log_progress import ByteProgress
from inflight.models.upload import Upload
from inflight.models.usable_values import why_unusable

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = ("F32", "BF16", "F16")
ROWS_COMPARED = 4096
"""So many at a time are in memory: tables of embeddings are the largest tensors of many checkpoints."""
SMALLEST_SCALE = 2.0**-126
"""The smallest normal number of float32."""


OLD_ENDINGS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Of names in the first checkpoints of BERT, and in many that were made of them -> as networks have them now."""


class Checkpoint:
    """The open files of one checkpoint, as a context manager. All errors are ConfigurationErrors that name the file."""

    def __init__(self, folder: str | Path, *, is_read: bool = True) -> None:
        """`is_read`: False = tensors are checked, and none but scales is read: `copy_into` leaves its targets as they
        are."""
        self.folder = Path(folder)
        self.is_read = is_read
        self._files: dict[str, Any] = {}
        self._read: set[str] = set()
        self._old_names: dict[str, str] = {}
        """In the files, of tensors that have other names here."""
        self._file_of = self._by_new_names(self._locate())
        self._upload: Upload | None = None
        """Made for the first tensor on a GPU."""
        self._num_bytes = 0
        """Of the parts of tensors that were read, as they are in the files; those of `slices` are not counted."""
        file_bytes = sum((self.folder / name).stat().st_size for name in set(self._file_of.values()))
        self._progress = ByteProgress(logger, "of the checkpoint are read by this rank", file_bytes)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            if self._upload is not None:
                self._upload.finish()
            if self._num_bytes:
                self._progress.end(self._num_bytes)
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def names(self) -> Collection[str]:
        """Of all tensors."""
        return self._file_of.keys()

    @property
    def paths(self) -> list[Path]:
        """Of the files with its tensors."""
        return [self.folder / name for name in sorted(set(self._file_of.values()))]

    def is_quantised_to(self, code: str) -> None:
        """What is read becomes codes of that name, which takes longer than to read it, and the log says so."""
        self._progress.what = f"of the checkpoint are read and quantised to {code} by this rank"

    def check(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOAT_DTYPES) -> None:
        """Raise unless there is a tensor `name` of that shape and one of `dtypes`, as safetensors names them.

        To be called before memory of that size is allocated.
        """
        self._slice(name, shape, dtypes)

    def copy_into(
        self,
        target: Tensor,
        name: str,
        shape: tuple[int, ...],
        starts: tuple[int, ...] = (0,),
        dtypes: tuple[str, ...] = FLOAT_DTYPES,
        added: float = 0.0,
        times: float = 1.0,
    ) -> None:
        """Copy a block of tensor `name` into `target`, converting its dtype; `added` to all its values, or each `times`
        a number.

        `shape` and `dtypes` are the whole tensor's expected shape and possible dtypes, and are checked. The block has
        the shape of `target` and begins at `starts` in the first dimensions, at 0 in the others. It may extend beyond
        the tensor's end; the elements of `target` beyond are left unchanged. Into a meta `target` nothing is read.
        Values that are no numbers, or none in the dtype of `target`, are refused. A `target` on a GPU has its values
        for what its current stream does afterwards, and for all once the context is left.
        """
        part = self._slice(name, shape, dtypes)
        if target.is_meta or not self.is_read:
            return
        starts = (*starts, *(0,) * (len(shape) - len(starts)))
        bounds = list(zip(starts, target.shape, shape, strict=True))
        index = tuple(slice(start, min(start + size, end)) for start, size, end in bounds)
        if any(found.stop <= found.start for found in index):
            return
        try:
            values = part[index]
        except SafetensorError as error:
            raise self._broken(self._file_of[name], error) from None
        if reason := why_unusable(values, target.dtype):
            raise ConfigurationError(f"{self.folder / self._file_of[name]}: tensor {name} {reason}")
        place = target[tuple(slice(found.stop - found.start) for found in index)]
        if added:
            values = values.to(target.dtype) + added
        if times != 1.0:
            values = values.to(target.dtype) * times
        if place.device.type == "cuda":
            self._upload = self._upload or Upload(place.device)
            if place.dim() > 1 and not place.is_contiguous() and place.mT.is_contiguous():
                values, place = values.mT, place.mT  # turned on the host
            self._upload.copy(values, place)
        else:
            place.copy_(values)
        self._note(values.nbytes)

    def read_scale(self, name: str) -> float:
        """The only element of tensor `name`, with which others are quantised. It is read also if they are not, since no
        memory keeps it."""
        return float(self.check_scales(name, self._shape_of_one(name)).item())

    def read_number(self, name: str) -> float:
        """The only element of tensor `name`, any number. It is read also if others are not, as a scale."""
        self._slice(name, self._shape_of_one(name), FLOAT_DTYPES)
        try:
            number = float(self._open(self._file_of[name]).get_tensor(name).item())
        except SafetensorError as error:
            raise self._broken(self._file_of[name], error) from None
        if not math.isfinite(number):
            raise ConfigurationError(f"{self.folder / self._file_of[name]}: tensor {name} is {number}, and no number")
        return number

    def _shape_of_one(self, name: str) -> tuple[int, ...]:
        """Of a tensor with one element."""
        if name not in self:
            raise self._missing(name)
        shape = tuple(self._open_slice(name).get_shape())
        if math.prod(shape) != 1:
            path = self.folder / self._file_of[name]
            raise ConfigurationError(f"{path}: tensor {name} has shape {list(shape)}, but one number is supported")
        return shape

    def check_scales(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """All of tensor `name`, with which others are quantised. Raises unless it has this shape and its elements are
        positive numbers: with zero, infinity or NaN the others would mean nothing. Nor with less than float32's normal
        numbers, of which a GPU may make zero, and whose inverse is infinite."""
        self._slice(name, shape, FLOAT_DTYPES)
        try:
            scales: Tensor = self._open(self._file_of[name]).get_tensor(name)
        except SafetensorError as error:
            raise self._broken(self._file_of[name], error) from None
        wide = scales.float()
        wrong = wide[~((wide >= SMALLEST_SCALE) & (wide < math.inf))]
        if len(wrong):
            raise ConfigurationError(
                f"{self.folder / self._file_of[name]}: tensor {name} holds {wrong[0].item():g}, but a scale is a "
                f"positive number of at least {SMALLEST_SCALE:.2g}"
            )
        return scales

    def read_order(self, name: str, num_inputs: int) -> Tensor:
        """All of tensor `name` (num_inputs,), int32: which of what is shared each input of a weight has. It is read
        also if others are not, since it decides how those are kept."""
        self._slice(name, (num_inputs,), ("I32",))
        try:
            order: Tensor = self._open(self._file_of[name]).get_tensor(name)
        except SafetensorError as error:
            raise self._broken(self._file_of[name], error) from None
        return order

    def read_bytes(self, name: str) -> bytes:
        """All of tensor `name`, uint8 of one dimension: a text that others are described with."""
        if name not in self:
            raise self._missing(name)
        part = self._open_slice(name, ("U8",))
        self._read.add(name)
        try:
            return bytes(part[:].flatten().tolist())
        except SafetensorError as error:
            raise self._broken(self._file_of[name], error) from None

    def dtype_of(self, name: str) -> str:
        """As safetensors names it. Raises if there is no tensor `name`."""
        if name not in self:
            raise self._missing(name)
        try:
            return str(self._stored(name).get_dtype())
        except SafetensorError as error:
            raise self._broken(self._file_of[name], error) from None

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of tensor `name`, whatever its dtype. Raises if there is none."""
        if name not in self:
            raise self._missing(name)
        try:
            return tuple(self._stored(name).get_shape())
        except SafetensorError as error:
            raise self._broken(self._file_of[name], error) from None

    def has_equal_values(self, name: str, other: str) -> bool:
        """Whether two tensors of floats hold the same numbers. Reads both; neither counts as asked for."""
        one, another = self._open_slice(name), self._open_slice(other)
        if one.get_shape() != another.get_shape():
            return False
        for first in range(0, one.get_shape()[0], ROWS_COMPARED):
            rows = slice(first, first + ROWS_COMPARED)
            if not torch.equal(one[rows].float(), another[rows].float()):
                return False
        return True

    def slices(self, ignored: tuple[str, ...] = (), without: Collection[str] = ()) -> dict[str, Any]:
        """All tensors by name as safetensors' lazy slices, except names that end with one of `ignored` or are one of
        `without`.

        A slice reads its bytes when it is indexed.
        """
        return {
            name: self._open_slice(name) for name in self._file_of if not name.endswith(ignored) and name not in without
        }

    def refuse_leftovers(self, ignored: tuple[str, ...] = (), unread: tuple[str, ...] = ()) -> None:
        """Raise if a tensor was never asked for, since the network lacks it; names that end in `ignored` or begin with
        `unread` are excepted."""
        leftovers = sorted(
            name
            for name in set(self._file_of) - self._read
            if not name.endswith(ignored) and not name.startswith(unread)
        )
        if leftovers:
            more = f" and {len(leftovers) - 3} more" if len(leftovers) > 3 else ""
            raise ConfigurationError(
                f"{self.folder}: the checkpoint holds tensors that its config.json does not account for: "
                f"{', '.join(leftovers[:3])}{more}"
            )

    def _note(self, num_bytes: int) -> None:
        """So many more were read."""
        self._num_bytes += num_bytes
        self._progress.note(self._num_bytes)

    def _slice(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Any:
        if name not in self._file_of:
            raise self._missing(name)
        file_name = self._file_of[name]
        part = self._open_slice(name, dtypes)
        found = tuple(part.get_shape())
        if found != shape:
            raise ConfigurationError(
                f"{self.folder / file_name}: tensor {name} has shape {list(found)}, config.json asks for {list(shape)}"
            )
        self._read.add(name)
        return part

    def _open_slice(self, name: str, dtypes: tuple[str, ...] = FLOAT_DTYPES) -> Any:
        file_name = self._file_of[name]
        try:
            part = self._stored(name)
        except SafetensorError as error:
            raise self._broken(file_name, error) from None
        if part.get_dtype() not in dtypes:
            raise ConfigurationError(
                f"{self.folder / file_name}: tensor {name} is {part.get_dtype()}; "
                f"only {', '.join(dtypes)} weights are supported"
            )
        return part

    def _stored(self, name: str) -> Any:
        """The lazy slice of a tensor that is there. Raises SafetensorError."""
        return self._open(self._file_of[name]).get_slice(self._old_names.get(name, name))

    def _by_new_names(self, file_of: dict[str, str]) -> dict[str, str]:
        for name in list(file_of):
            for old, new in OLD_ENDINGS.items():
                if name.endswith(old):
                    now = name.removesuffix(old) + new
                    self._old_names[now] = name
                    file_of[now] = file_of.pop(name)
        return file_of

    def _locate(self) -> dict[str, str]:
        """Tensor name -> file name."""
        index = self.folder / INDEX_FILE
        if index.exists():
            return self._read_index(index)
        if (self.folder / SINGLE_FILE).exists():
            return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        pickled = any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pt"))
        remedy = "; its weights are pickled, save them with save_pretrained(safe_serialization=True)" if pickled else ""
        raise ConfigurationError(f"{self.folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}{remedy}")

    def _read_index(self, index: Path) -> dict[str, str]:
        try:
            entries = json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
            file_of = {str(name): str(file_name) for name, file_name in entries}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ConfigurationError(f"{index} is not a safetensors index: it must hold a weight_map object") from None
        for file_name in sorted(set(file_of.values())):
            # A name with a path could reach outside the folder.
            if Path(file_name).name != file_name:
                raise ConfigurationError(f"{index} names the file {file_name!r}, which is outside the folder")
            if not (self.folder / file_name).is_file():
                raise ConfigurationError(f"{index} names the file {file_name}, which is not there: download it again")
        return file_of

    def _open(self, file_name: str) -> Any:
        if file_name not in self._files:
            try:
                self._files[file_name] = safe_open(str(self.folder / file_name), framework="pt")
            except (SafetensorError, OSError) as error:
                raise self._broken(file_name, error) from None
        return self._files[file_name]

    def _missing(self, name: str) -> ConfigurationError:
        return ConfigurationError(f"{self.folder}: the checkpoint has no tensor {name}")

    def _broken(self, file_name: str, error: Exception) -> ConfigurationError:
        return ConfigurationError(
            f"{self.folder / file_name} is not a whole safetensors file ({error}): download it again"
        )
