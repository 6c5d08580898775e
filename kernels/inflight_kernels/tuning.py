"""Launch configurations that were tuned on a device beforehand. While serving they are only looked up.

    tuned("activate_and_mul", {"tokens": 32, "dtype": "bfloat16"}, {"BLOCK_I": 1024, "num_warps": 4}, x.device)

A table is a file of this package, `tuned/<device>-triton-<major.minor>.json`, written by `make gpu-tune-kernels` on
that device with that triton: {"operations": {operation: [{"shape": {...}, "config": {...}}, ...]}}. Without a table, or
without an entry that is near enough, the launcher's own default is used.

An entry is considered if it has the same dimensions as the requested shape and the same configuration keys as the
default, and if all dimensions given as text (dtypes, and sizes that must not differ, such as str(head_dim)) are equal.
Its distance is the sum of |log2(ratio)| over the numeric dimensions. The nearest entry is used, the first of equally
near ones, if its distance is at most `REACH`. Launchers round sizes to powers of two, so that few different shapes are
looked up. An operation that must not depend on the batch (deterministic mode) must leave the batch out of its shape.

Knows no kernel.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

TABLES = Path(__file__).with_name("tuned")
# Largest distance, summed over all dimensions, at which an entry is still used: 2 is a factor of 4 in one dimension.
REACH = 2.0

Shape = tuple[tuple[str, "int | str"], ...]
Config = Mapping[str, int]

# Operation -> the configuration that a tuning script is trying now (None: the default), and the shapes looked up by it.
_trials: dict[str, tuple[Config | None, set[Shape]]] = {}


def tuned(operation: str, shape: Mapping[str, int | str], default: Config, device: torch.device) -> Config:
    """The configuration for launching `operation` at `shape` on `device`: the table's nearest entry, or `default`."""
    if _trials and operation in _trials:
        config, shapes = _trials[operation]
        shapes.add(tuple(shape.items()))
        return default if config is None else config
    if device.type != "cuda":
        return default
    index = torch.cuda.current_device() if device.index is None else device.index
    for config in _lookup(operation, tuple(shape.items()), index):
        if config.keys() == default.keys():
            return config
    return default


@contextmanager
def trying(operation: str, config: Config | None) -> Iterator[set[Shape]]:
    """Within the context, `tuned` returns `config` for `operation` on every device, or the default if it is None.

    Yields the set of shapes that were looked up meanwhile.
    """
    shapes: set[Shape] = set()
    _trials[operation] = (config, shapes)
    try:
        yield shapes
    finally:
        del _trials[operation]


def table_path(device_name: str, triton_version: str) -> Path:
    """Path of the table for a device (by CUDA's name of it) and a triton version (only major.minor is used)."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return TABLES / f"{slug}-triton-{'.'.join(triton_version.split('.')[:2])}.json"


def nearest(entries: list[dict[str, Any]], shape: Shape) -> list[Config]:
    """The configurations of the entries within `REACH` of `shape`, nearest first."""
    asked = dict(shape)
    near = []
    for entry in entries:
        distance = _distance(asked, entry["shape"])
        if distance <= REACH:
            near.append((distance, MappingProxyType(entry["config"])))
    return [config for _, config in sorted(near, key=lambda pair: pair[0])]


def _distance(asked: Mapping[str, int | str], known: Mapping[str, int | str]) -> float:
    if asked.keys() != known.keys():
        return math.inf
    total = 0.0
    for name, value in asked.items():
        other = known[name]
        if isinstance(value, str) or isinstance(other, str):
            if value != other:
                return math.inf
        else:
            total += abs(math.log2(max(value, 1) / max(other, 1)))
    return total


@functools.lru_cache(maxsize=4096)
def _lookup(operation: str, shape: Shape, device_index: int) -> tuple[Config, ...]:
    return tuple(nearest(_table(device_index).get(operation, []), shape))


@functools.cache
def _table(device_index: int) -> dict[str, list[dict[str, Any]]]:
    path = table_path(torch.cuda.get_device_name(device_index), version("triton"))
    if not path.exists():
        return {}
    operations: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())["operations"]
    return operations
