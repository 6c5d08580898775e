"""Checks that a folder is a Hugging Face checkpoint, and tells whether its network writes text.

Reads file names and small JSON files only; loads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from inflight.checkpoint_files import CONFIG, GGUF, INDEX, VOCABULARIES, check_files
from inflight.errors import ConfigurationError
from inflight.output_config import Pooled
from inflight.score_tokens import AUTO, find_score_tokens

ENCODERS = (
    "Bert",
    "Roberta",
    "XLMRoberta",
    "MPNet",
    "ModernBert",
    "Camembert",
    "DistilBert",
    "Electra",
    "Ernie",
    "NomicBert",
    "JinaEmbeddingsV3",
    "EuroBert",
    "DebertaV2",
)
"""How the names of architectures begin that write no text."""
DECODERS = (
    "Llama",
    "Mistral",
    "Mixtral",
    "Qwen2",
    "Qwen2Moe",
    "Qwen3",
    "Qwen3Moe",
    "Gemma2",
    "Gemma3Text",
    "Phi3",
    "SmolLM3",
    "StableLm",
    "Starcoder2",
    "Glm4",
)
"""How they begin that write none without their head."""
OF_ENCODERS: Mapping[str, Pooled] = {
    "Model": "vectors",
    "ForMaskedLM": "vectors",
    "ForSequenceClassification": "scores",
}
"""How these names end -> what the network gives of a text. Of decoders there is no second kind."""


def check(
    folder: Path,
    *,
    tokenizer: Path | None = None,
    tensor_parallel_size: int = 1,
    moe_expert_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
) -> None:
    """Raise ConfigurationError with one sentence if `folder` cannot be served by so many ranks. `tokenizer`: folder of
    the tokenizer; None = `folder`."""
    check_folder(folder)
    check_files(folder)
    config = _json(folder / "config.json", f"{folder} is not a Hugging Face checkpoint: it has no config.json")
    if not (config.get("architectures") or config.get("model_type")):
        raise ConfigurationError(f"{folder / 'config.json'} names no architecture, so it is not a model's")
    _check_ranks(config, tensor_parallel_size, divides_experts=moe_expert_parallel_size > 1)
    _check_stages(config, pipeline_parallel_size)
    _check_weights(folder)
    place = tokenizer or folder
    check_files(place)
    if not any(file.is_file() for pattern in VOCABULARIES for file in place.glob(pattern)):
        raise ConfigurationError(
            f"{place} has no tokenizer.json (nor tokenizer.model or vocab.json): copy it there, or set tokenizer_dir "
            "to the folder that has it"
        )


def find_pooled(folder: Path, score_tokens: str = AUTO, tokenizer: str = "") -> Pooled:
    """What a checkpoint gives of a text if it writes none; "scores" only if that is one, of a pair. What cannot be read
    here is left to the ranks. `score_tokens`, `tokenizer`: of EngineConfig."""
    try:
        config = _json(folder / CONFIG, "")
        if find_score_tokens(score_tokens, folder, Path(tokenizer or folder)) is not None:
            return "scores"
    except ConfigurationError:
        return ""
    names, labels = config.get("architectures"), config.get("id2label")
    name = names[0] if isinstance(names, list) and names else ""
    kinds = {family + kind: pooled for family in ENCODERS + DECODERS for kind, pooled in OF_ENCODERS.items()}
    found = kinds.get(str(name), "")
    # A configuration that names no labels has two of them.
    has_one = isinstance(labels, dict) and len(labels) == 1
    return "vectors" if found == "scores" and not has_one else found


def check_folder(folder: Path) -> None:
    """Raise ConfigurationError if there is no such folder."""
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder} is not a folder: give the folder of a Hugging Face checkpoint, a GGUF file, or "
            "ORGANISATION/NAME of a model on the hub"
        )


def _check_ranks(config: Mapping[str, object], num_ranks: int, *, divides_experts: bool) -> None:
    """Ranks say the same, but only after a server was started for them. What this cannot read is left to them, and
    whether the sizes are those of experts that ranks divide."""
    sizes = () if divides_experts else ("intermediate_size", "moe_intermediate_size")
    for key in ("num_attention_heads", "num_key_value_heads", *sizes):
        value = config.get(key)
        if not isinstance(value, int) or value < 1 or value % num_ranks == 0:
            continue
        if key == "intermediate_size" and "moe_intermediate_size" in config:
            continue  # of dense layers, of which such a model may have none
        if key == "num_key_value_heads" and num_ranks % value == 0:
            continue  # ranks hold copies of a head
        raise ConfigurationError(
            f"tensor_parallel_size {num_ranks} does not divide the checkpoint's {key} ({value}): choose another one"
        )


def _check_stages(config: Mapping[str, object], num_stages: int) -> None:
    """Likewise."""
    num_layers = config.get("num_hidden_layers")
    if isinstance(num_layers, int) and 1 <= num_layers < num_stages:
        raise ConfigurationError(
            f"pipeline_parallel_size {num_stages} is more than the checkpoint's {num_layers} layers; "
            f"set it to at most {num_layers}"
        )


def _check_weights(folder: Path) -> None:
    if (folder / INDEX).is_file():
        weight_map = _json(folder / INDEX, "").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigurationError(f"{folder / INDEX} has no weight_map")
        shards = set(map(str, weight_map.values()))
        missing = sorted(shard for shard in shards if not (folder / shard).is_file())
        if missing:
            raise ConfigurationError(
                f"{folder} is incomplete: {len(missing)} of {len(shards)} shards missing ({missing[0]})"
            )
    elif not (folder / GGUF).is_file() and not any(folder.glob("*.safetensors")):
        other = next(
            (path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern)), None
        )
        found = f", only {other}" if other else ""
        remedy = "name the GGUF file instead" if other and other.endswith(".gguf") else "save the model as safetensors"
        raise ConfigurationError(f"{folder} has no safetensors weights{found}: {remedy}")


def _json(path: Path, missing: str) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(missing) from None
    except RecursionError:
        raise ConfigurationError(f"{path} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path} is not a JSON object")
    return value
