"""What an engine computes, and with what, as its leader describes it: figures of a server mean little without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from inflight.prompt_tuning import EmbeddingType
    from inflight.request_limits import RequestLimits

ARITHMETIC = (
    *("device", "layers", "sum_order", "dtype", "weight_dtype", "activations", "kv_cache_dtype", "deterministic"),
    *("tensor_parallel_size", "moe_expert_parallel_size"),
)
"""Fields on which the bits of a token depend."""


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What is unknown is empty."""

    device: str
    """Device type of the ranks, cpu or cuda."""
    device_name: str = ""
    """The leader's CPU or GPU."""
    checkpoint: str = ""
    """Name of its folder, without the path: where files lie on a machine concerns no client."""
    architecture: str = ""
    layers: str = ""
    """What computes them: native, compiled (native, in C++) or transformers."""
    sum_order: str = ""
    """In which C++ layers add up products of bfloat16, fma or amx; of other layers and types empty."""
    dtype: str = ""
    """Of activations, such as bfloat16."""
    weight_dtype: str = ""
    """Of the weights: that, or as the checkpoint stores quantised ones, int4 or fp8."""
    activations: str = ""
    """What C++ layers make of those that quantised weights are multiplied with: int8; empty if they are kept."""
    kv_cache_dtype: str = ""
    """Of the keys and values in the cache: that of the activations, or fp8."""
    deterministic: bool = False
    """Whether layers of torch and of GPUs compute the same bits however they are batched."""
    num_ranks: int = 1
    """Of all replicas together; the next four say how they share the work."""
    tensor_parallel_size: int = 1
    moe_expert_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    inflight_version: str = ""
    torch_version: str = ""

    @property
    def embedding_type(self) -> EmbeddingType:
        """Of rows that a request brings: they are rounded to the type of the activations in any case."""
        return self.dtype if self.dtype in ("float16", "bfloat16") else "float32"  # type: ignore[return-value]

    def summary(self, limits: RequestLimits) -> str:
        """With the engine's limits, in a line for its operator."""
        sizes = ("tensor_parallel_size", "moe_expert_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        shared = "".join(f", {key} {getattr(self, key)}" for key in sizes if getattr(self, key) > 1)
        return (
            f"{self.architecture} on {self.device} ({self.device_name}), {self.layers} layers; "
            f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}{shared}; "
            f"dtype {self.dtype}, weights {self.weight_dtype}{' times ' * bool(self.activations)}{self.activations}, "
            f"{self._keeps(limits)}; "
            f"max_batch_size {limits.max_batch_size}, max_seq_len {limits.max_seq_len}"
        )

    def _keeps(self, limits: RequestLimits) -> str:
        if limits.pooled:
            return f"gives {limits.pooled} of texts"
        each = " a replica" if self.data_parallel_size > 1 else ""
        return f"KV cache {self.kv_cache_dtype} of {limits.kv_cache_tokens} tokens{each}"

    def changes(self, before: EngineDescription) -> str:
        """What is computed otherwise than by the ranks `before`, as a list for a sentence; empty if nothing is."""
        found = [(name, getattr(before, name), getattr(self, name)) for name in ARITHMETIC]
        return ", ".join(f"{name} {new} instead of {old}" for name, old, new in found if old != new)

    def labels(self) -> dict[str, str]:
        """As labels of a metric."""
        return {
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in msgspec.structs.asdict(self).items()
        }
