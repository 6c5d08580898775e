"""Low-rank adapters (LoRA) as requests name them, and as the leader passes their weights to the ranks.

A client names an adapter by a LoRARequest or by a LoraConfig, whose names are TensorRT-LLM's. The leader finds it or
loads it, has all ranks store it, and puts a LoadedAdapter in their place. Knows no files and no tensors.

Legend of the weights: r rank of the adapter, I input and O output features of the layer that it changes:
y = W x + scale * B (A x), A (r, I), B (O, r).
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from inflight.errors import InvalidRequest

MAX_NAME_LENGTH = 128
MAX_ROWS = 2**14
"""Of a LoraConfig: more than there are layers to adapt in any network."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class LoRARequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """An adapter by name. The fields are those of TensorRT-LLM's LLM API."""

    lora_name: str
    """Letters, digits, `.`, `_` and `-`. Without a path: of an adapter that is loaded, or of a folder in `lora_dir`."""
    lora_int_id: int = 0
    """Another name, by which requests may give the adapter as `LoraConfig.task_id`; 0 = none."""
    lora_path: str = ""
    """Folder of an adapter as PEFT saves it, on the leader's machine. It is read when the name is first used. For
    programs: clients of a server cannot set it."""
    lora_ckpt_source: str = "hf"
    """The format of the folder; only hf, which is PEFT's."""

    def validate(self) -> None:
        """Raise InvalidRequest, with one sentence, for a name or an id that is none."""
        if len(self.lora_name) > MAX_NAME_LENGTH or not _NAME.fullmatch(self.lora_name):
            raise InvalidRequest(
                f"lora_name must be 1 to {MAX_NAME_LENGTH} letters, digits, '.', '_' or '-' and begin with a letter or "
                "a digit"
            )
        if not 0 <= self.lora_int_id < 2**64:
            raise InvalidRequest(f"lora_int_id must be from 0 to 2^64 - 1, got {self.lora_int_id}")
        if self.lora_ckpt_source != "hf":
            raise InvalidRequest("lora_ckpt_source must be hf: adapters are read in PEFT's format only")


class LoraConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """An adapter by number. Its first use brings the weights, later ones only the number."""

    task_id: int
    """uint64, not 0."""
    weights: bytes = b""
    """A row for each adapted layer: A (r, I) and behind it B (O, r), already multiplied by the scale, row by row and
    little-endian; the rest of a row is padding. All rows have the same length."""
    config: list[tuple[int, int, int]] = []
    """For each row: TensorRT-LLM's number of the module, the layer's number, r."""
    weights_dtype: Literal["float16", "float32"] = "float16"

    @classmethod
    def of(
        cls, task_id: int, weights: npt.NDArray[Any] | None = None, config: npt.ArrayLike | None = None
    ) -> LoraConfig:
        """From arrays (rows, row length), of float16 or float32, and (rows, 3). Both or neither.

        Raises InvalidRequest if they do not fit together."""
        if weights is None or config is None:
            if weights is not None or config is not None:
                raise InvalidRequest("lora_weights and lora_config must be given together")
            return cls(task_id)
        rows = np.asarray(config)
        _check_num_rows(len(rows) if rows.ndim else 0)
        if weights.ndim != 2 or rows.shape != (weights.shape[0], 3) or not np.issubdtype(rows.dtype, np.integer):
            raise InvalidRequest(
                "lora_weights must be [rows, elements] and lora_config [rows, 3] whole numbers, got "
                f"{list(weights.shape)} and {list(rows.shape)}"
            )
        is_single = weights.dtype == np.float32
        dtype: Literal["float16", "float32"] = "float32" if is_single else "float16"
        data = np.ascontiguousarray(weights, "<f4" if is_single else "<f2").tobytes()
        return cls(task_id, data, [(int(m), int(layer), int(r)) for m, layer, r in rows], dtype)

    def rows(self) -> npt.NDArray[Any]:
        """(rows, row length), read-only. Raises InvalidRequest if the bytes are not as many rows as `config` has."""
        numbers = len(self.weights) // np.dtype(self.weights_dtype).itemsize
        if not self.config or not numbers or numbers % len(self.config):
            raise InvalidRequest("lora_weights must have as many rows as lora_config, all of the same length")
        kind = "<f4" if self.weights_dtype == "float32" else "<f2"
        return np.frombuffer(self.weights[: numbers * int(kind[-1])], kind).reshape(len(self.config), -1)

    def validate(self) -> None:
        """Raise InvalidRequest, with one sentence, for what can be no adapter. The weights themselves are checked
        against the network when they are loaded."""
        if not 1 <= self.task_id < 2**64:
            raise InvalidRequest(f"lora_task_id must be from 1 to 2^64 - 1, got {self.task_id}")
        _check_num_rows(len(self.config))
        if bool(self.weights) != bool(self.config):
            raise InvalidRequest("lora_weights and lora_config must be given together")


def _check_num_rows(num_rows: int) -> None:
    """Before each row becomes a tuple: a tensor of a gigabyte may have a hundred million."""
    if num_rows > MAX_ROWS:
        raise InvalidRequest(f"lora_config has {num_rows} rows, more than {MAX_ROWS}")


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter that every rank has stored."""

    uid: int
    """The leader's number of it. None is used twice: weights that are loaded again have another."""
    digest: bytes
    """Of its weights: requests of equal ones share cached prefixes."""


class AdapterModule(msgspec.Struct, frozen=True):
    """The adapter's part for one layer of the checkpoint."""

    name: str
    """Of the layer's tensors in the checkpoint, without ending: model.layers.0.self_attn.q_proj."""
    rank: int
    scale: float
    dtype: Literal["float32", "float16", "bfloat16"]
    a: bytes
    """(r, I), row by row and little-endian."""
    b: bytes
    """(O, r)"""

    @property
    def num_bytes(self) -> int:
        return len(self.a) + len(self.b)


class AdapterPart(msgspec.Struct, frozen=True):
    """Some modules of an adapter, in the order in which ranks get them."""

    uid: int
    modules: list[AdapterModule]


class AdapterOrders(msgspec.Struct, frozen=True, omit_defaults=True):
    """What every rank changes in its store, before it takes the requests of the same input."""

    parts: list[AdapterPart] = []
    dropped: list[int] = []
    """uids that no request uses and none will."""


NO_ORDERS = AdapterOrders()


def lora_scale(alpha: float, rank: int, *, use_rslora: bool) -> float:
    """What PEFT multiplies B (A x) with."""
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank
