"""A checkpoint's config.json as transformers reads it, with its defaults for what the file leaves out.

transformers takes seconds to import, most of the time in which a rank starts. So the values that it found in a file are
kept, and a rank whose network is this engine's own does not import it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from inflight.errors import ConfigurationError
from inflight_kernels.cache_folder import cache_folder

ATTRIBUTES = ("dtype", "rope_theta", "rope_scaling", "layer_types", "num_hidden_layers")
"""What to_dict leaves out, or turns into text, in some versions of transformers."""
FORMAT = b"4"
"""Of the kept files; another number is another name."""


def read_hf_config(path: Path) -> Any:
    """The config.json at `path` as transformers' PreTrainedConfig. Code of the checkpoint is not run."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path.parent, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        # transformers' validators raise exceptions of many types; in every case the file has to be changed.
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{path} is not a configuration that transformers accepts: {reason}") from None


def read_values(path: Path) -> dict[str, Any]:
    """The values of the config.json at `path`, completed. Raises ConfigurationError."""
    kept = _kept_at(path)
    values = _read_kept(kept)
    if values is None:
        # Through JSON, so that the first start finds what later ones find.
        text = json.dumps(_values(read_hf_config(path)), default=_dtype_name)
        values = _as_dict(text)
        if kept is not None:
            _keep(kept, text)
    return values


OF_ALL = ("architectures", "quantization_config", "tie_word_embeddings")
"""What config.json says of a text and others, such as images, together."""


def _values(config: Any) -> dict[str, Any]:
    """Those of its text; of most that is all."""
    text = config.get_text_config()
    if text is config:
        return _own_values(config)
    whole = _own_values(config)
    values = _own_values(text)
    values |= {key: whole[key] for key in OF_ALL if whole.get(key) is not None}
    values["dtype"] = values.get("dtype") or whole.get("dtype")
    return values


def _own_values(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = config.to_dict()
    for key in ATTRIBUTES:
        if values.get(key) is None:
            values[key] = getattr(config, key, None)
    # Some classes have names of their own for what others call alike.
    for common, own in config.attribute_map.items():
        values.setdefault(common, values.get(own))
    return values


def _dtype_name(value: Any) -> str:
    """The only values of a configuration that JSON has no type for."""
    return str(value).removeprefix("torch.")


def _kept_at(path: Path) -> Path | None:
    """Where the values of this file, as this version of transformers reads it, are kept; None = nowhere."""
    content = path.read_bytes()
    if b'"configuration_files"' in content:  # transformers may read another file instead
        return None
    try:
        folder = cache_folder("configs")
    except OSError:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for part in (FORMAT, version("transformers").encode(), content):
        digest.update(len(part).to_bytes(8, "little") + part)
    return folder / f"{digest.hexdigest()}.json"


def _read_kept(kept: Path | None) -> dict[str, Any] | None:
    try:
        return None if kept is None else _as_dict(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _as_dict(text: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(text)
    if type(values) is not dict:
        raise ValueError("not an object")
    return values


def _keep(kept: Path, text: str) -> None:
    """Ranks may do so at once: whoever is last replaces an equal file. A disk that is full costs only time."""
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
        whole = Path(scratch, kept.name)
        whole.write_text(text, encoding="utf-8")
        os.replace(whole, kept)
