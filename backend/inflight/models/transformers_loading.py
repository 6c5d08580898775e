"""From a checkpoint to a TransformersDecoder: the class's own way to read weights, from our safetensors files alone.

Knows no device but the one that it is given, and nothing of how a network is run.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from inflight.errors import ConfigurationError
from inflight.models.checkpoint import Checkpoint
from inflight.models.inspection import Unfit, check_tokens, inspect
from inflight.models.transformers_config import TransformersConfig
from inflight.models.transformers_decoder import TransformersDecoder

logger = logging.getLogger(__name__)

NOT_WEIGHTS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""Ends of names that old checkpoints carry and that follow from their config.json."""


def load_transformers_decoder(
    config: TransformersConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, max_seq_len: int
) -> TransformersDecoder:
    """Raises ConfigurationError for a checkpoint that is not whole, and for a class that cannot be served."""
    network = _read(config, checkpoint, dtype)
    if device.type == "cpu":
        # One after the other, so that memory holds little twice; until now they may point into the files.
        for parameter in network.parameters():
            parameter.data = parameter.data.clone()
    network.requires_grad_(False).to(device)
    try:
        findings = inspect(network, max_seq_len, device)
        decoder = TransformersDecoder.assemble(network, findings.backbone, findings.cache_specs, max_seq_len, device)
        check_tokens(network, decoder, max_seq_len, device)
    except Unfit as reason:
        raise ConfigurationError(f"{checkpoint.folder}: {config.architecture} cannot be served: {reason}") from None
    except Exception as error:
        raise ConfigurationError(
            f"{checkpoint.folder}: {config.architecture} cannot be served, "
            f"it does not run with paged attention: {type(error).__name__}: {error}"
        ) from error
    return decoder


def _read(config: TransformersConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    disable_progress_bar()
    try:
        # Given tensors, transformers looks for no files, no adapters and no code.
        network, report = config.network_class.from_pretrained(
            None,
            config=config.hf_config,
            state_dict=checkpoint.slices(),
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
        )
    except RuntimeError as error:
        raise ConfigurationError(f"{checkpoint.folder}: {' '.join(str(error).split())}") from None
    _refuse(checkpoint, "has no tensor", report["missing_keys"])
    leftovers = {name for name in report["unexpected_keys"] if not name.endswith(NOT_WEIGHTS)}
    _refuse(checkpoint, "holds tensors that its config.json does not account for:", leftovers)
    return network.eval()


def _refuse(checkpoint: Checkpoint, what: str, names: set[str]) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        shown = ", ".join(sorted(names)[:3])
        raise ConfigurationError(f"{checkpoint.folder}: the checkpoint {what} {shown}{more}")
