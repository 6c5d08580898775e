"""Chooses the code that computes a checkpoint: the native decoder if it supports it, else transformers' modelling code.

transformers' model classes take seconds to import, so they are imported only for its modelling code.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from inflight.checkpoint_files import CONFIG, check_files
from inflight.config import EngineConfig
from inflight.distributed.parallel_groups import ParallelGroups
from inflight.errors import ConfigurationError
from inflight.models.adapter_places import AdapterPlaces
from inflight.models.cache_scales import has_cache_scales
from inflight.models.checkpoint import Checkpoint
from inflight.models.compiled import keeps_codes, order_of_products
from inflight.models.config import ModelConfig, read_architecture
from inflight.models.config_file import NotNative
from inflight.models.decoder_loading import load_decoder
from inflight.models.encoder_loading import load_encoder
from inflight.models.families import ENCODERS, HEADLESS
from inflight.models.formats.code_cache import CodeCache
from inflight.models.formats.on_load import OnLoadFormat
from inflight.models.gguf_checkpoint import open_checkpoint
from inflight.models.network import Network
from inflight.models.pipeline_stage import layers_of_stage
from inflight.models.shared_weights import SharedWeights
from inflight.models.transformers_config import TransformersConfig
from inflight.models.transformers_plan import NO_EXPERTS, NotSplit, check_plan, expert_counts
from inflight.models.weights import WeightLoader
from inflight.score_tokens import ScoreTokens, find_score_tokens
from inflight_kernels import Code, Inputs

logger = logging.getLogger(__name__)

UNUSED_SCALES = (
    "the checkpoint brings scales for a KV cache in fp8, which are not used: kv_cache_dtype is not fp8, which would "
    "make room for more tokens, and round them"
)
Config = TypeVar("Config", ModelConfig, TransformersConfig)
KV_DTYPES = {"auto": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""See WeightLoader, by `kv_cache_dtype`."""
INPUTS = {"auto": None, "keep": Inputs.KEPT, "int8": Inputs.INT8}
"""See Target, by `cpu_activations`."""
NO_SCALES = "the checkpoint brings no scales for the KV cache in fp8: keys and values are stored with the scale 1"


def read_config(config: EngineConfig) -> ModelConfig | TransformersConfig:
    """The checkpoint's configuration, for the implementation that `model_impl` and the checkpoint determine.

    Raises ConfigurationError if the requested implementation, or with auto neither of them, supports the checkpoint.
    """
    check_files(config.gpt_model_path)
    checkpoint = Path(config.gpt_model_path)
    score_tokens = find_score_tokens(config.score_tokens, checkpoint, Path(config.tokenizer_dir or checkpoint))
    if config.model_impl == "transformers":
        return _through_transformers(config, "model_impl is transformers", score_tokens)
    try:
        model = ModelConfig.load(checkpoint, score_tokens)
    except NotNative as reason:
        if config.model_impl == "native":
            raise ConfigurationError(f"model_impl is native, but {reason}; set model_impl to auto") from None
        if read_architecture(checkpoint / CONFIG) in {**ENCODERS, **HEADLESS}:  # which transformers' code is not for
            raise ConfigurationError(str(reason)) from None
        return _through_transformers(config, str(reason), score_tokens)
    if config.moe_expert_parallel_size > 1 and model.family.experts is None:
        raise ConfigurationError(
            f"moe_expert_parallel_size is {config.moe_expert_parallel_size}, but {model.architecture} of "
            f"{config.gpt_model_path} has no experts; set moe_expert_parallel_size to 1"
        )
    logger.info("the engine's own layers compute %s", model.architecture)
    return model if config.quantization == "none" else _quantized_on_load(config, model)


def _quantized_on_load(config: EngineConfig, model: Config) -> Config:
    if model.weight_format.quantized:
        raise ConfigurationError(
            f"quantization is {config.quantization}, and the weights of {config.gpt_model_path} are "
            f"{model.weight_format.quantized} already; set quantization to none"
        )
    return replace(model, weight_format=OnLoadFormat(Code(config.quantization)))


def _through_transformers(config: EngineConfig, reason: str, score_tokens: ScoreTokens | None) -> TransformersConfig:
    model = TransformersConfig.load(config.gpt_model_path)
    if score_tokens is not None:
        raise ConfigurationError(
            f"{model.architecture} is to score texts by logits of tokens (score_tokens), but transformers' modelling "
            f"code computes it ({reason}), which writes text only; set score_tokens to none to have it do that"
        )
    if config.pipeline_parallel_size > 1:
        raise ConfigurationError(
            f"pipeline_parallel_size is {config.pipeline_parallel_size}, but transformers' modelling code computes "
            f"{model.architecture} ({reason}), which runs in one stage only; set pipeline_parallel_size to 1"
        )
    if config.tensor_parallel_size > 1:
        try:
            check_plan(model.architecture, model.hf_config, config.tensor_parallel_size)
        except NotSplit as why:
            raise ConfigurationError(
                f"tensor_parallel_size is {config.tensor_parallel_size}, but transformers' modelling code computes "
                f"{model.architecture} ({reason}): {why}; set tensor_parallel_size to 1"
            ) from None
    if config.moe_expert_parallel_size > 1 and not any(expert_counts(model.hf_config.get_text_config(decoder=True))):
        raise ConfigurationError(
            f"moe_expert_parallel_size is {config.moe_expert_parallel_size}, but {model.architecture} of "
            f"{config.gpt_model_path} {NO_EXPERTS}"
        )
    if config.deterministic:
        raise ConfigurationError(
            f"deterministic is true, but transformers' modelling code computes {model.architecture} ({reason}), whose "
            "products depend on the batch; set deterministic to false"
        )
    logger.info("transformers' modelling code computes %s: %s", model.architecture, reason)
    return model if config.quantization == "none" else _quantized_on_load(config, model)


def load_network(
    config: EngineConfig,
    model: ModelConfig | TransformersConfig,
    groups: ParallelGroups,
    dtype: torch.dtype,
    device: torch.device,
    max_seq_len: int,
    adapters: AdapterPlaces | None = None,
    weights: SharedWeights | None = None,
    checkpoint: Checkpoint | None = None,
) -> Network:
    """Read this rank's part of the network, for sequences of up to `max_seq_len` tokens. Raises ConfigurationError.

    `adapters`: where to note which layers take low-rank adapters.
    `weights`: the memory of the native decoder's; if it is filled none are read. None = memory of the rank's own.
    `checkpoint`: None = that of gpt_model_path.
    """
    kv_dtype = KV_DTYPES[config.kv_cache_dtype]
    stores_fp8 = kv_dtype == torch.float8_e4m3fn
    is_read = weights is None or not weights.is_filled or not isinstance(model, ModelConfig)
    with checkpoint or open_checkpoint(config.gpt_model_path, is_read=is_read) as tensors:
        if has_cache_scales(tensors) != stores_fp8:
            logger.info(NO_SCALES if stores_fp8 else UNUSED_SCALES)
        return _load(config, model, groups, dtype, device, max_seq_len, adapters, weights, tensors)


def _load(
    config: EngineConfig,
    model: ModelConfig | TransformersConfig,
    groups: ParallelGroups,
    dtype: torch.dtype,
    device: torch.device,
    max_seq_len: int,
    adapters: AdapterPlaces | None,
    weights: SharedWeights | None,
    checkpoint: Checkpoint,
) -> Network:
    cache = None
    if isinstance(model.weight_format, OnLoadFormat) and device.type == "cpu" and checkpoint.is_read:
        cache = CodeCache(checkpoint, model.weight_format.code, dtype)
        model = replace(model, weight_format=replace(model.weight_format, cache=cache))
    kv_dtype, inputs = KV_DTYPES[config.kv_cache_dtype], INPUTS[config.cpu_activations]
    if isinstance(model, ModelConfig):
        loader = WeightLoader(
            checkpoint,
            model.weight_format,
            groups.tensor,
            dtype,
            device,
            adapters,
            config.deterministic,
            weights,
            kv_dtype=kv_dtype,
            keeps_codes=keeps_codes(config, model, device, groups.tensor),
            inputs=inputs,
            expert_parallel_size=config.moe_expert_parallel_size,
        )
        if model.family.encoder is not None:
            return load_encoder(model, loader, max_seq_len)
        # One position more than a sequence can have: the next step may have been launched already when it ends.
        decoder = load_decoder(model, loader, max_seq_len + 1, layers_of_stage(model.num_layers, groups.pipeline))
        if cache is not None:
            cache.finish()
        return decoder
    from inflight.models.transformers_loading import load_transformers_decoder

    return load_transformers_decoder(
        model,
        checkpoint,
        dtype,
        device,
        max_seq_len,
        kv_dtype=kv_dtype,
        inputs=inputs,
        order=order_of_products(config, dtype, device),
        adapters=adapters,
        group=groups.tensor,
        expert_parallel_size=config.moe_expert_parallel_size,
    )
