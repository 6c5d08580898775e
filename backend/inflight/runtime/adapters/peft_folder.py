"""Reads an adapter from a folder as PEFT saves it: adapter_config.json and adapter_model.safetensors.

The tensors say which layers are adapted, in whatever way `target_modules` names them. What would change the network in
another way than A and B do is refused. Files are read into memory, not mapped: a mapped one that somebody shortens
meanwhile would end the rank with a signal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from inflight.errors import InvalidRequest
from inflight.lora import AdapterModule, LoRARequest, lora_scale
from inflight.models.adapter_places import AdapterPlaces
from inflight.runtime.adapters.adapter_weights import AdapterWeights, make_module

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 2**20
HEADER_BYTES = 2**20
"""More than the names and shapes of an adapter's tensors take in its file."""
PREFIX = "base_model.model."
ENDINGS = (".lora_A.weight", ".lora_B.weight")

PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (None, False),
    "use_bdlora": (None, False, {}),
    "arrow_config": (None, {}),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
}
"""Keys of adapter_config.json that would change what an adapter computes, or the weights that it is added to -> the
values with which they do not. PEFT's own defaults are among them, so that a missing key is one."""


def find_folder(request: LoRARequest, lora_dir: str) -> tuple[Path, Path | None]:
    """The adapter's folder, and the folder that its files must not leave: None for one that a program names.

    Raises InvalidRequest if there is none."""
    if request.lora_path:
        return Path(request.lora_path), None
    unknown = InvalidRequest(f"there is no LoRA adapter {request.lora_name}")
    if not lora_dir:
        raise unknown
    # The name is checked to be no path; a link would lead elsewhere all the same.
    root = Path(lora_dir).resolve()
    folder = root / request.lora_name
    if not folder.is_dir() or folder.resolve() != folder:
        raise unknown
    return folder, folder


def read_peft_folder(
    name: str, folder: Path, within: Path | None, places: AdapterPlaces, max_bytes: int
) -> AdapterWeights:
    """`name`: how messages call the adapter, which tell clients no paths. `within`: see find_folder. Raises
    InvalidRequest, with one sentence."""
    what = f"LoRA adapter {name}"
    for file_name in (CONFIG_FILE, WEIGHTS_FILE):
        path = folder / file_name
        if not path.is_file() or (within is not None and path.resolve().parent != within):
            raise InvalidRequest(f"{what}: its folder has no file {file_name}")
    rank, scale = _read_config(what, folder / CONFIG_FILE)
    data = _read_file(what, folder / WEIGHTS_FILE, max_bytes + HEADER_BYTES)
    if data is None:
        raise InvalidRequest(f"{what}: it is larger than lora_cache_host_memory_bytes {max_bytes}")
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError):
        raise InvalidRequest(f"{what}: {WEIGHTS_FILE} is not a whole safetensors file") from None
    del data
    layers = sorted({_layer(what, tensor, places) for tensor in tensors})
    modules = [_read_module(what, tensors, layer, places, rank, scale) for layer in layers]
    if not modules:
        raise InvalidRequest(f"{what}: {WEIGHTS_FILE} holds no tensors")
    return AdapterWeights.of(modules)


def _read_file(what: str, path: Path, most: int) -> bytes | None:
    """All bytes of a file; None if it has more than `most`. Not trusted to stay as long as it was."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > most:
                return None
            data = file.read(most + 1)
    except OSError as error:
        raise InvalidRequest(f"{what}: {path.name} cannot be read: {error.strerror}") from None
    return data if len(data) <= most else None


def _read_config(what: str, path: Path) -> tuple[int, float]:
    """Returns (r, scale)."""
    data = _read_file(what, path, MAX_CONFIG_BYTES)
    if data is None:
        raise InvalidRequest(f"{what}: {CONFIG_FILE} has more than {MAX_CONFIG_BYTES} bytes")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, Mapping):
        raise InvalidRequest(f"{what}: {CONFIG_FILE} is not a JSON object")
    for key, plain in PLAIN_VALUES.items():
        if values.get(key, plain[0]) not in plain:
            expected = json.dumps(plain[1] if plain[0] is None else plain[0])
            raise InvalidRequest(f"{what}: {key} in {CONFIG_FILE} is not supported except as {expected}")
    rank, alpha, use_rslora = values.get("r"), values.get("lora_alpha"), values.get("use_rslora", False)
    if type(rank) is not int or rank < 1:
        raise InvalidRequest(f"{what}: r in {CONFIG_FILE} must be a whole number of at least 1")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < 1e6:
        raise InvalidRequest(f"{what}: lora_alpha in {CONFIG_FILE} must be a number")
    if type(use_rslora) is not bool:
        raise InvalidRequest(f"{what}: use_rslora in {CONFIG_FILE} must be true or false")
    return rank, lora_scale(alpha, rank, use_rslora=use_rslora)


def _layer(what: str, tensor: str, places: AdapterPlaces) -> str:
    """The layer that a tensor of the adapter belongs to."""
    for ending in ENDINGS:
        layer = tensor.removeprefix(PREFIX).removesuffix(ending)
        if tensor == f"{PREFIX}{layer}{ending}" and layer in places.places:
            return layer
    raise InvalidRequest(
        f"{what}: {WEIGHTS_FILE} holds {tensor[:120]!r}, but only the linear layers of the network's attention and MLP "
        "can be adapted, not a mixture of experts"
    )


def _read_module(
    what: str, tensors: Mapping[str, Tensor], layer: str, places: AdapterPlaces, rank: int, scale: float
) -> AdapterModule:
    names = [f"{PREFIX}{layer}{ending}" for ending in ENDINGS]
    missing = set(names) - set(tensors)
    if missing:
        raise InvalidRequest(f"{what}: {WEIGHTS_FILE} lacks {missing.pop()}")
    a, b = (tensors[name] for name in names)
    if a.dim() != 2 or a.shape[0] != rank:
        raise InvalidRequest(f"{what}: the rank of {layer} is not the r of {CONFIG_FILE}, {rank}")
    return make_module(places, what, layer, a, b, scale)
