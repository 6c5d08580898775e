"""The files of one model: most have one; llama.cpp's gguf-split makes several of a large one.

    NAME-00001-of-00003.gguf    the model's metadata, and tensors, if they are not all in the others
    NAME-00002-of-00003.gguf    tensors

Each has split.no (from 0 on), split.count and split.tensors.count (of all parts) in its metadata. Opens no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from inflight.checkpoint_files import GGUF, GGUF_PARTS
from inflight.errors import ConfigurationError
from inflight.gguf.metadata import Metadata

ENDING = ".gguf"
PART = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)
NUMBER, COUNT, NUM_TENSORS = "split.no", "split.count", "split.tensors.count"
COMPANIONS = re.compile(r"mmproj|imatrix|mtp-|eagle3-|dflash-|dspark-")
"""In the names of files beside a model's, which are none: of images, of its quantisation, of heads that draft. After
llama.cpp (common/download.cpp)."""
MOST_NAMED = 3


def part_names(name: str) -> list[str]:
    """Of all files of a model, of which `name` is one."""
    found = PART.fullmatch(name)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]):
        return [name]
    numbers = range(1, int(found["count"]) + 1)
    return [f"{found['model']}-{number:05d}-of-{found['count']}{ENDING}" for number in numbers]


def model_of(name: str) -> str:
    """What the model is called that has a file of this name."""
    found = PART.fullmatch(name)
    return found["model"] if found is not None else name.removesuffix(ENDING)


def first_files(names: Iterable[str]) -> list[str]:
    """Of these names: the first file of each model, whether it is among them or not."""
    models = (name for name in names if name.endswith(ENDING) and not COMPANIONS.search(name.rpartition("/")[2]))
    return sorted({part_names(name)[0] for name in models})


def find_parts(file: Path) -> list[Path]:
    """All files of a model, of which `file` is one. Raises ConfigurationError if one is not there."""
    parts = [file.with_name(name) for name in part_names(file.name)]
    missing = [part.name for part in parts if part != file and not part.exists()]
    if missing:
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        raise ConfigurationError(
            f"{file} is one of {len(parts)} parts of a model, and {', '.join(missing[:MOST_NAMED])}{more} "
            f"{'is' if len(missing) == 1 else 'are'} not beside it: download what is missing"
        )
    return parts


def link_names(count: int) -> list[str]:
    """What a model of so many files has in the folder that is made of it."""
    return [GGUF, *part_names(f"{model_of(GGUF)}-00001-of-{count:05d}{ENDING}")[1:]]


def linked_files(folder: Path) -> list[Path]:
    """They, as they lie in a folder."""
    return [folder / GGUF, *sorted(folder.glob(GGUF_PARTS))]


def check_parts(parts: Sequence[Metadata], num_tensors: int) -> None:
    """Raise ConfigurationError unless these are all parts of one model, in order. `num_tensors`: of all of them."""
    for number, metadata in enumerate(parts):
        count = max(metadata.whole(COUNT, 1), 1)
        if count != len(parts):
            raise ConfigurationError(
                f"{metadata.path} is one of {count} parts of a model by its metadata ({COUNT}), and of {len(parts)} "
                f"by its name: call them NAME-00001-of-{count:05d}{ENDING} and so on"
            )
        if count > 1 and (found := metadata.whole(NUMBER)) != number:
            raise ConfigurationError(
                f"{metadata.path} is part {found + 1} of {count} by its metadata ({NUMBER}), and part {number + 1} by "
                "its name: download it again"
            )
        if count > 1 and (expected := metadata.whole(NUM_TENSORS)) != num_tensors:
            raise ConfigurationError(
                f"{metadata.path}: the model has {expected} tensors by its metadata ({NUM_TENSORS}), and {num_tensors} "
                f"are in its {count} parts: download them again"
            )
