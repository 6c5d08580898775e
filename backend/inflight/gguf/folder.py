"""A GGUF file becomes a folder: config.json and a tokenizer made of its metadata, and a link to the file, or to each
part of a model in several.

It lies in the cache of this user, under a name that stands for the files and for the code that made it. So it is made
once, and never changed: relaunched ranks find what the first ones found.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from inflight.cache_folder import cache_folder
from inflight.checkpoint_files import CONFIG, INDEX, WEIGHTS
from inflight.config_keys import is_set
from inflight.errors import ConfigurationError
from inflight.gguf.parts import ENDING, find_parts, first_files, link_names, model_of, part_names

CHECKPOINT, TOKENIZER = "gpt_model_path", "tokenizer_dir"
PARAMETERS = (CHECKPOINT, TOKENIZER, "speculative_model_dir")
"""Of the engine, which may name a GGUF file."""


def with_folders(parameters: Mapping[str, str], folder: str | Path) -> dict[str, str]:
    """The engine's parameters with folders for the GGUF files that they name. `folder`: where relative paths start.
    Raises ConfigurationError."""
    files = {key: file for key in PARAMETERS if (file := _named_file(parameters, key, folder)) is not None}
    if files and parameters.get("executor", "").strip() == "external":
        key, file = next(iter(files.items()))
        raise ConfigurationError(
            f"{key}: {file} is a GGUF file, which ranks that others start do not read: name the folder that is printed "
            f"by python -m inflight.gguf {file}"
        )
    has_own_tokenizer = is_set(parameters.get(TOKENIZER, "")) and files.get(TOKENIZER) != files.get(CHECKPOINT)
    needs = {CHECKPOINT: not has_own_tokenizer, TOKENIZER: True}
    made = {key: str(make_folder(file, with_tokenizer=needs.get(key, False))) for key, file in files.items()}
    return {**parameters, **made}


def _named_file(parameters: Mapping[str, str], key: str, folder: str | Path) -> Path | None:
    text = parameters.get(key, "")
    return find_file(Path(folder, text.strip())) if is_set(text) else None


def find_file(path: Path) -> Path | None:
    """The GGUF file that `path` names, itself or that of the only model in a folder that is no other checkpoint; None
    if it is anything else. Raises ConfigurationError."""
    if path.suffix == ENDING and not path.is_dir():
        if not path.exists():
            raise ConfigurationError(f"{path} is not there: give the path of a GGUF file")
        return path
    if any((path / name).exists() for name in (CONFIG, INDEX, WEIGHTS)):
        return None
    present = [file.name for file in path.glob(f"*{ENDING}")] if path.is_dir() else []
    models = first_files(present)
    if len(models) > 1:
        names = ", ".join([*models[:3], *(["…"] if len(models) > 3 else [])])
        raise ConfigurationError(f"{path} holds {len(models)} GGUF files ({names}): name one of them")
    return path / min(set(part_names(models[0])) & set(present)) if models else None


def make_folder(file: Path, *, with_tokenizer: bool = True) -> Path:
    """The folder of a checkpoint for the model in this file, or of which it is a part. Raises ConfigurationError if it
    is damaged, or if the engine cannot serve what it holds."""
    files = find_parts(Path(os.path.abspath(file)))  # not where a link leads, whose name says nothing
    try:
        place = cache_folder("gguf") / _identity(files, with_tokenizer) / model_of(files[0].name)
        if not place.is_dir():
            _write(place, files, _contents(files, with_tokenizer))
    except OSError as error:
        raise ConfigurationError(
            f"the configuration of {files[0]} cannot be written down ({error.strerror or error}): set "
            "INFLIGHT_CACHE_DIR to a folder that can"
        ) from None
    return place


def _identity(files: Sequence[Path], with_tokenizer: bool) -> str:
    """Of the files, and of what decides what is made of them."""
    digest = hashlib.blake2b(repr((with_tokenizer, version("tokenizers"))).encode(), digest_size=16)
    for file in files:
        found = os.stat(file)
        decisive = (str(file), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        digest.update(repr(decisive).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _contents(files: Sequence[Path], with_tokenizer: bool) -> dict[str, str]:
    """Names and texts of the files that are made."""
    from inflight.gguf.config import config_of
    from inflight.gguf.file import GgufFile
    from inflight.gguf.tokenizer import KIND, Vocabulary, tokenizer_config, tokenizer_of

    opened = GgufFile(*files)
    values = config_of(opened)
    if KIND not in opened.metadata:
        return {CONFIG: _json({**values, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None})}
    vocabulary = Vocabulary.of(opened.metadata)
    special = {"bos": "bos", "eos": "eos", "pad": "padding"}
    values |= {f"{name}_token_id": vocabulary.special_id(key) for name, key in special.items()}
    made = {
        CONFIG: _json(values),
        "generation_config.json": _json({"eos_token_id": vocabulary.end_ids}),
        "tokenizer_config.json": _json(tokenizer_config(vocabulary)),
    }
    if with_tokenizer:
        made["tokenizer.json"] = tokenizer_of(vocabulary).to_str()
    return made


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False, indent=2)


def _write(place: Path, files: Sequence[Path], contents: Mapping[str, str]) -> None:
    """As a whole: others see all files or none. Whoever comes second leaves the first one's."""
    place.parent.mkdir(mode=0o700, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=place.parent))
    try:
        for name, text in contents.items():
            (scratch / name).write_text(text, encoding="utf-8")
        for name, file in zip(link_names(len(files)), files, strict=True):
            (scratch / name).symlink_to(file)
        try:
            scratch.rename(place)
        except OSError:
            if not place.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
