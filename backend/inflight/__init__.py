"""inflight: an LLM backend for Triton Inference Server, and the same engine as a library.

    from inflight import GenerationExecutor

    with GenerationExecutor.create("path/to/checkpoint") as executor:
        print(executor.generate("Once upon a time", max_tokens=32).text)

`GenerationExecutor` takes text, token ids or embeddings and gives results to wait for or to iterate over. `Executor` is
the level below it: token ids in, responses out. Both are loaded when they are first used, because much else imports
this package.

The package reads downwards, and each folder imports only from those below it:

    server          tensors <-> Request/Response, inside tritonserver's stub process
    openai          OpenAI's API over HTTP, in a process of its own
    asking          what a client wants, whoever asks, as requests to the engine
    text            text <-> tokens, for both servers and for programs that use the engine as a library
    executor        how ranks are launched and reached
    batch_manager   the worker loop of every rank: GptManager, Scheduler, KVCacheManager
    runtime         one device: ModelRunner, Sampler
    models, layers  the networks and their parts
    distributed     communication between ranks

    supervisor      separate from the rest: `inflight serve`, which starts, watches and ends a whole server

The files beside this one (request, result, config, stats, errors, …) are the ground floor: values that all folders
use. Of this package they import only each other.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inflight.config import EngineConfig, SchedulerPolicy
    from inflight.context_phase import ContextPhaseParams, RequestType
    from inflight.errors import (
        ConfigurationError,
        DuplicateRequest,
        EngineUnavailable,
        InflightError,
        InvalidRequest,
        QueueFull,
        RequestCancelled,
        RequestError,
        RequestTimedOut,
    )
    from inflight.executor.executor import Executor, attach_executor
    from inflight.executor.front.generation_result import GenerationResult
    from inflight.executor.front.prompt_adapters import PromptAdapterRequest
    from inflight.executor.front.request_output import CompletionOutput, RequestOutput
    from inflight.executor.generation_executor import GenerationExecutor
    from inflight.executor.in_process import InProcessExecutor
    from inflight.guided_decoding import GuidedDecodingParams, GuideType
    from inflight.kv_cache_events import (
        KVCacheCreatedData,
        KVCacheEvent,
        KVCacheEventDiff,
        KVCacheRemovedData,
        KVCacheStoredBlockData,
        KVCacheStoredData,
        KVCacheUpdatedData,
    )
    from inflight.kv_cache_retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
    from inflight.logits_post_processor import LogitsPostProcessorConfig
    from inflight.lora import LoraConfig, LoRARequest
    from inflight.output_config import AdditionalModelOutput, OutputConfig
    from inflight.prompt_tuning import EmbeddingTable, PromptTuningConfig
    from inflight.request import Request
    from inflight.result import FinishReason, Response, Result
    from inflight.sampling_config import SamplingConfig
    from inflight.speculative_decoding import (
        DraftTargetDecodingConfig,
        ExternalDraftTokensConfig,
        LookaheadDecodingConfig,
        NGramDecodingConfig,
    )
    from inflight.stats import IterationStats, RequestStage, RequestStats, RequestStatsPerIteration

__version__ = "0.2.0"

_HOMES = {
    "inflight.config": ("EngineConfig", "SchedulerPolicy"),
    "inflight.context_phase": ("ContextPhaseParams", "RequestType"),
    "inflight.errors": (
        "ConfigurationError",
        "DuplicateRequest",
        "EngineUnavailable",
        "InflightError",
        "InvalidRequest",
        "QueueFull",
        "RequestCancelled",
        "RequestError",
        "RequestTimedOut",
    ),
    "inflight.executor.executor": ("Executor", "attach_executor"),
    "inflight.executor.front.generation_result": ("GenerationResult",),
    "inflight.executor.front.prompt_adapters": ("PromptAdapterRequest",),
    "inflight.executor.front.request_output": ("CompletionOutput", "RequestOutput"),
    "inflight.executor.generation_executor": ("GenerationExecutor",),
    "inflight.executor.in_process": ("InProcessExecutor",),
    "inflight.kv_cache_events": (
        "KVCacheCreatedData",
        "KVCacheEvent",
        "KVCacheEventDiff",
        "KVCacheRemovedData",
        "KVCacheStoredBlockData",
        "KVCacheStoredData",
        "KVCacheUpdatedData",
    ),
    "inflight.kv_cache_retention": ("KvCacheRetentionConfig", "TokenRangeRetentionConfig"),
    "inflight.logits_post_processor": ("LogitsPostProcessorConfig",),
    "inflight.lora": ("LoraConfig", "LoRARequest"),
    "inflight.guided_decoding": ("GuidedDecodingParams", "GuideType"),
    "inflight.output_config": ("AdditionalModelOutput", "OutputConfig"),
    "inflight.prompt_tuning": ("EmbeddingTable", "PromptTuningConfig"),
    "inflight.request": ("Request",),
    "inflight.sampling_config": ("SamplingConfig",),
    "inflight.speculative_decoding": (
        "DraftTargetDecodingConfig",
        "ExternalDraftTokensConfig",
        "LookaheadDecodingConfig",
        "NGramDecodingConfig",
    ),
    "inflight.result": ("FinishReason", "Response", "Result"),
    "inflight.stats": ("IterationStats", "RequestStage", "RequestStats", "RequestStatsPerIteration"),
}
"""Module -> its public names. Type checkers read the same from the imports above."""

__all__ = [
    "AdditionalModelOutput",
    "CompletionOutput",
    "ConfigurationError",
    "ContextPhaseParams",
    "DraftTargetDecodingConfig",
    "DuplicateRequest",
    "EmbeddingTable",
    "EngineConfig",
    "EngineUnavailable",
    "Executor",
    "ExternalDraftTokensConfig",
    "FinishReason",
    "GenerationExecutor",
    "GenerationResult",
    "GuideType",
    "GuidedDecodingParams",
    "InProcessExecutor",
    "InflightError",
    "InvalidRequest",
    "IterationStats",
    "KVCacheCreatedData",
    "KVCacheEvent",
    "KVCacheEventDiff",
    "KVCacheRemovedData",
    "KVCacheStoredBlockData",
    "KVCacheStoredData",
    "KVCacheUpdatedData",
    "KvCacheRetentionConfig",
    "LoRARequest",
    "LogitsPostProcessorConfig",
    "LookaheadDecodingConfig",
    "LoraConfig",
    "NGramDecodingConfig",
    "OutputConfig",
    "PromptAdapterRequest",
    "PromptTuningConfig",
    "QueueFull",
    "Request",
    "RequestCancelled",
    "RequestError",
    "RequestOutput",
    "RequestStage",
    "RequestStats",
    "RequestStatsPerIteration",
    "RequestTimedOut",
    "RequestType",
    "Response",
    "Result",
    "SamplingConfig",
    "SchedulerPolicy",
    "TokenRangeRetentionConfig",
    "attach_executor",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'inflight' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
