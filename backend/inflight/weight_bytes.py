"""How much host memory the weights of a checkpoint take at least, by the sizes of its files."""

from __future__ import annotations

from pathlib import Path

from inflight.checkpoint_files import GGUF, GGUF_PARTS
from inflight.config import EngineConfig

WEIGHTS = ("*.safetensors", GGUF, GGUF_PARTS)
LEAST = {"int8": 4, "fp8": 4, "int4": 8}
"""By how much weights of floats become smaller at most that are quantised while they are read."""
GPU = Path("/dev/nvidiactl")


def host_bytes(config: EngineConfig) -> int:
    """Of all ranks together; 0 on a GPU, and where the checkpoint has no files of weights."""
    if config.device == "cuda" or (config.device == "auto" and GPU.exists()):
        return 0
    folder = Path(config.gpt_model_path)
    files = {path for pattern in WEIGHTS for path in folder.glob(pattern) if path.is_file()}
    return sum(path.stat().st_size for path in files) // LEAST.get(config.quantization, 1)
