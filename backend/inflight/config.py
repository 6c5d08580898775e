"""The engine's configuration: read once from the `parameters` of `config.pbtxt`, validated, then immutable.

Keys have TensorRT-LLM's names where it has such a key, so that its users and Model Analyzer's sweeps know them. An
empty value or an unfilled `${name}` means unset; an unknown key is an error that names the nearest known one.
Does not know tritonserver: its input is plain strings.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from pathlib import Path

from inflight.config_keys import (
    LARGEST,
    NOT_NEGATIVE_KEYS,
    POSITIVE_KEYS,
    TRITONSERVER_KEYS,
    UNSUPPORTED_KEYS,
    check_unsupported,
    is_set,
    one_of,
    parse,
)
from inflight.config_ranks import check_ranks
from inflight.errors import ConfigurationError, InvalidRequest
from inflight.guided_decoding import GuidedDecodingBackend
from inflight.speculative_decoding import (
    NO_LOOKAHEAD,
    DraftTargetDecodingConfig,
    LookaheadDecodingConfig,
    NGramDecodingConfig,
    SpeculativeDecodingConfig,
)

CPU_SIZES = (64, 2048, 16)
"""max_batch_size, max_num_tokens and tokens_per_block where they are unset."""
GPU_SIZES = (256, 8192, 64)
"""The same on a GPU: a decode step reads all weights however few rows it has, attention wants long runs of keys in one
block, and 8192 tokens of a prefill keep the tensor cores busy. Usual values of the field, not measured here."""


class SchedulerPolicy(str, Enum):
    """Which waiting sequences may start, and whether running ones may be paused."""

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    MAX_UTILIZATION = "max_utilization"
    STATIC_BATCH = "static_batch"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One field per key. The table of backend/CONFIGURATION.md repeats the docstring of each field."""

    gpt_model_path: str = "checkpoint"
    """Hugging Face checkpoint folder, or a GGUF file; a relative path starts at the model's version folder. Or
    ORGANISATION/NAME of a model on the hub, with :TAG of a GGUF file, @REVISION, both or neither behind it, unless
    something lies at that path."""
    tokenizer_dir: str = ""
    """Folder of the tokenizer; unset = the checkpoint folder."""
    gpt_model_type: str = "inflight_fused_batching"
    """inflight_batching or inflight_fused_batching, which mean the same here; V1 is refused."""
    model_impl: str = "auto"
    """Code that computes the network: native (this engine's), transformers (its own) or auto (native if supported)."""
    dtype: str = "auto"
    """auto (the checkpoint's; float32 where torch would widen 16 bits on a CPU), float32, bfloat16 or float16; also
    the KV cache's."""
    quantization: str = "none"
    """Weights of a checkpoint of floats become int8, int4 or fp8 while they are read, or none does. On a CPU C++
    multiplies them, on a GPU int4 alone."""
    deterministic: bool = False
    """Torch layers and GPU kernels compute the same bits of a token however it is batched, as C++ does, but slower."""
    score_tokens: str = "auto"
    """Tokens by whose logits a language model scores pairs of texts and writes none: no,yes (the score is the logit of
    the last less that of the first), one alone, none, or auto (as the checkpoint says)."""
    device: str = "auto"
    """auto (cuda if a GPU is available, else cpu), cpu or cuda."""

    executor: str = "auto"
    """How ranks are started: auto (one of the next three), uniproc, mpi, mpi_leader, multiproc, ray or external."""
    tensor_parallel_size: int = 1
    """Ranks over which every layer is split."""
    moe_expert_parallel_size: int = 1
    """Sets of ranks that divide a layer's experts; the ranks of a set split each of theirs; 1 = all ranks split all."""
    pipeline_parallel_size: int = 1
    """Pipeline stages, each with consecutive layers on its own ranks; the first ones get the layers left over."""
    data_parallel_size: int = 1
    """Replicas of the model in one engine, each with its own ranks and KV cache; all on one machine."""
    gpu_device_ids: str = ""
    """Comma-separated device number of each rank, replica by replica; unset = the rank's own number."""
    mpi_hostfile: str = ""
    """Hostfile for mpiexec; unset = all ranks on this machine."""
    mpi_interface: str = ""
    """Network interface by which ranks of several machines communicate, the same name on all; unset = chosen."""
    ray_address: str = "auto"
    """Ray cluster of executor ray: HOST:PORT, local (one is started), or auto: this machine's, else a local one."""
    ray_placement: str = "pack"
    """Ranks of executor ray: pack (on as few machines as have room) or spread (over as many as there are)."""
    ray_runtime_env: str = ""
    """Runtime environment of ranks in Ray, a JSON object: {"env_vars": {"NAME": "value"}} and Ray's other fields."""
    worker_heartbeat_timeout_ms: int = 10_000
    """Ranks that send no heartbeat for this long count as hung and are relaunched."""
    worker_start_timeout_ms: int = 600_000
    """Time within which ranks must be ready after their launch."""
    journal_max_tokens: int = 1_000_000
    """Requests of more tokens, prompt and output, end with an error when ranks die; all others go on; 0 = all end."""
    journal_max_replays: int = 10
    """Times that a request goes on with new ranks; then it ends with an error when they die."""
    journal_max_deaths: int = 3
    """Deaths of ranks in a row, without a new token, that end a request with an error; at the last it is alone."""

    spare_ranks: int = 0
    """Loaded sets of ranks of each replica that wait to take over when its ranks die, within moments; on CPUs only."""

    share_weights: bool = True
    """Ranks on CPUs keep weights in shared memory, which relaunched ranks, spares and replicas map and do not read."""
    context_replicas: int = 0
    """So many of data_parallel_size replicas, the first, compute the others' prompts; 0 = all do both; on CPUs only."""
    max_tokens_in_buffer: int = 0
    """Prompt tokens whose KV blocks wait in host memory for other ranks; 0 = none are handed over; on CPUs only."""
    kv_transfer_timeout_ms: int = 10_000
    """Time within which they must be fetched; otherwise the ranks that go on compute the prompt."""
    kv_transfer_interface: str = ""
    """Network interface by which ranks of other machines fetch them, encrypted; unset = none can."""
    kv_transfer_key_file: str = ""
    """File of a secret, equal on all engines that hand contexts over; unset = those of one user on one machine do."""

    max_batch_size: int = 0
    """Sequences in one step; 0 = 64, on a GPU 256 (tritonserver's own max_batch_size stays 0)."""
    max_beam_width: int = 0
    """Beams of a request; 0 = max_batch_size."""
    max_num_tokens: int = 0
    """Tokens in one step, prompt chunks included; 0 = 2048, on a GPU 8192."""
    max_seq_len: int = 0
    """Prompt plus new tokens of a sequence; 0 = the checkpoint's max_position_embeddings."""
    max_input_len: int = 0
    """Prompt tokens of a request; 0 = max_seq_len - 1."""
    max_queue_size: int = 0
    """Requests that may wait in addition to max_batch_size active ones; more are refused at once; 0 = no limit."""
    enable_chunked_context: bool = True
    """Compute long prompts in chunks beside running decodes; false = in one step, so prompts fit in max_num_tokens."""
    inter_token_latency_target_ms: int = 0
    """Milliseconds that a step beside running decodes may take, which bounds the chunks of prompts in it; 0 = any."""
    batch_scheduler_policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT
    """guaranteed_no_evict, max_utilization or static_batch."""
    guided_decoding_backend: GuidedDecodingBackend = GuidedDecodingBackend.LLGUIDANCE
    """llguidance follows guides exactly or refuses them; xgrammar takes more schemas, and drops what it lacks."""
    guided_decoding_check: bool = False
    """Hold answers that ended by themselves against their guides once more, by a validator; a failure is counted."""
    priority_preemption: bool = False
    """Requests of higher priority pause running ones of lower priority if rows or KV blocks are short."""

    tokens_per_block: int = 0
    """KV cache block size, a power of two; 0 = 16, on a GPU 64."""
    kv_cache_dtype: str = "auto"
    """auto (the type of the activations), fp8 (e4m3, on GPUs from sm_89 on) or int8 (a scale for a token and head)."""
    max_tokens_in_paged_kv_cache: int = 0
    """KV cache size in tokens; if a memory fraction is set too, the smaller size applies; 0 = by fraction alone."""
    kv_cache_free_gpu_mem_fraction: float = 0.0
    """Fraction of the memory free after loading; 0 = 0.9 on a GPU; on a CPU 0.2, at most 4 GiB and a full batch."""
    memory_share: float = 1.0
    """Part of the memory for KV caches, of the host or of each GPU, that is this engine's beside others."""
    enable_kv_cache_reuse: bool = True
    """Share the KV blocks of equal prefixes between requests with the same cache salt."""
    enable_partial_reuse: bool = False
    """Reuse blocks also in part, by copying them: prefixes then need not be equal in whole blocks (see SECURITY.md)."""
    copy_on_partial_reuse: bool = True
    """With enable_partial_reuse: also copy from blocks that other requests are using."""
    kv_cache_host_memory_bytes: int = 0
    """Host memory of each rank for cold blocks and states: pinned, or on a CPU a nameless file in TMPDIR; 0 = none."""
    secondary_offload_min_priority: int = 30
    """Retention priority, 0 to 100, from which on cold blocks go to host memory; others are given up."""
    state_snapshot_interval: int = 512
    """Recurrent layers: tokens after which a sequence's state is kept again, for requests with the same prefix."""
    num_state_snapshots: int = 0
    """Recurrent layers: kept states; 0 = 4 for each of max_batch_size, in at most a quarter of the cache's memory."""
    event_buffer_max_size: int = 0
    """KV cache events that are kept for a program until it fetches them; 0 = none are made."""

    max_draft_len: int = 0
    """Prompt lookup: draft tokens that a step verifies for a sequence, unless its request says; 0 = none."""
    max_matching_ngram_size: int = 3
    """Prompt lookup: most of the last tokens that are looked up in earlier text, unless the request says."""
    lookahead_window_size: int = 0
    """Lookahead decoding: later tokens that the model guesses at a time, unless the request says; 0 = none."""
    lookahead_ngram_size: int = 0
    """Lookahead decoding: tokens of the n-grams that its guesses form; 0 only if lookahead_window_size is."""
    lookahead_verification_set_size: int = 0
    """Lookahead decoding: n-grams that are kept of each first token, to be verified; 0 = none."""
    speculative_model_dir: str = ""
    """Draft model: checkpoint folder of a smaller network with the same tokenizer; relative to the version folder."""
    speculative_max_draft_len: int = 4
    """Draft model: draft tokens that it makes for a sequence in a step, unless its request says; 0 = none."""

    max_loras: int = 0
    """LoRA adapters that run at once; 0 = none, or as many as lora_cache_gpu_memory_fraction holds."""
    lora_dir: str = ""
    """Folder of adapters that clients may name, a PEFT folder each; a relative path starts at the version folder."""
    lora_cache_max_adapter_size: int = 64
    """Largest rank of an adapter, at most 128: each of max_loras takes the memory of this rank."""
    lora_cache_gpu_memory_fraction: float = 0.0
    """Fraction of the memory free after loading that adapters on the device may take at most; 0 = no limit."""
    lora_cache_host_memory_bytes: int = 1_073_741_824
    """Bytes of adapters that a rank keeps in host memory; those not used for the longest time are dropped first."""

    cpu_compile: str = "auto"
    """Layers in C++: auto (native networks on one machine, a CPU with AVX2 or NEON, a wheel or g++), true or false."""
    cpu_order: str = "auto"
    """Order in which C++ adds up products of bfloat16: auto (amx where there is AMX, else fma), fma or amx. Machines
    with the same order compute the same bits."""
    cpu_activations: str = "auto"
    """What C++ multiplies int8 and int4 weights with: keep (activations as they are), int8 (quantised by token and
    group: faster, rounded), auto (int8 if the checkpoint says so, else keep)."""
    cuda_graph_mode: bool = True
    """Decode steps of the engine's own layers replay CUDA graphs, recorded before the engine is ready. Without effect
    on a CPU and with several pipeline stages."""
    kernel_cache_dir: str = ""
    """Folder of compiled GPU kernels, kept between starts; relative to the version folder; unset = triton's own, which
    TRITON_CACHE_DIR names."""
    busy_wait_events: bool = False
    """On a GPU the host waits for a step by spinning: some microseconds sooner, for a whole core of each rank."""
    num_threads: int = 0
    """Threads of one rank on CPU; 0 = OMP_NUM_THREADS if that is set, otherwise cores divided by ranks."""

    generation_config: str = "auto"
    """auto takes what a request leaves open from the checkpoint's generation_config.json; none does not."""
    exclude_input_in_output: bool = False
    """Leave the prompt out of non-streamed output; a request's own flag wins."""
    max_responses_per_second: int = -1
    """Rate limit of all running streams together; excess tokens wait; 0 = none; -1 = 60 a core on CPU, else none."""
    cancellation_check_period_ms: int = 100
    """Interval between checks whether the clients of requests have cancelled them."""
    stats_check_period_ms: int = 100
    """Interval between updates of the metrics."""
    iter_stats_max_iterations: int = 1000
    """Iterations whose statistics a program can fetch afterwards; 0 = none are made. The server keeps none."""
    request_stats_max_iterations: int = 0
    """Iterations for which the same of every request can be fetched; 0 = none are made. The server keeps none."""
    max_text_bytes: int = 1_048_576
    """Longest accepted text_input in bytes, checked before it is tokenised; less if max_input_len cannot hold it."""
    max_tensor_bytes_per_request: int = 268_435_456
    """Most bytes of logits, log probabilities and hidden states that one request may ask for."""
    logits_post_processors: str = ""
    """Functions that requests may name to change their logits: name=module:attribute, comma-separated."""
    logits_post_processor_batched: str = ""
    """module:attribute of the function for all requests that name batched; unset = none."""
    logits_post_processor_replicate: bool = True
    """Every rank that samples calls these functions; false = the first one does, and sends the logits to the others."""
    max_prompt_embedding_bytes: int = 33_554_432
    """Most bytes of embeddings (prompt_embedding_table, prompt_embeds) that one request may bring; at most 48 MiB."""
    max_images: int = 16
    """Images of one conversation or prompt; 0 = none is read, and no process is started for them."""
    max_image_bytes: int = 10_485_760
    """Longest file of an image."""
    max_image_pixels: int = 33_554_432
    """Width times height of an image, read from its header before it is decoded."""
    image_timeout_ms: int = 60_000
    """Time that one image may take, in a process that gives way to the ranks; then that process is replaced."""
    max_image_cache_bytes: int = 268_435_456
    """Most bytes of embeddings of images that are kept for when the same ones come again; 0 = none."""
    otlp_traces_endpoint: str = ""
    """URL of an OTLP receiver for OpenTelemetry spans of requests, as http://localhost:4318/v1/traces; unset = none."""
    log_level: str = "INFO"
    """Level of the ranks' log: DEBUG, INFO, WARNING or ERROR."""

    def __post_init__(self) -> None:
        if self.gpt_model_type == "V1":
            raise ConfigurationError("gpt_model_type: Static batching type is deprecated; use inflight_fused_batching")
        one_of("gpt_model_type", self.gpt_model_type, ("inflight_batching", "inflight_fused_batching"))
        one_of("model_impl", self.model_impl, ("auto", "native", "transformers"))
        one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        one_of("quantization", self.quantization, ("none", "int8", "int4", "fp8"))
        one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", "fp8", "int8"))
        one_of("device", self.device, ("auto", "cpu", "cuda"))
        one_of("cpu_compile", self.cpu_compile, ("auto", "true", "false"))
        one_of("cpu_order", self.cpu_order, ("auto", "fma", "amx"))
        one_of("cpu_activations", self.cpu_activations, ("auto", "keep", "int8"))
        one_of("generation_config", self.generation_config, ("auto", "none"))
        if self.otlp_traces_endpoint and not self.otlp_traces_endpoint.startswith(("http://", "https://")):
            raise ConfigurationError(
                "otlp_traces_endpoint must be a URL that begins with http:// or https://, "
                f"got {self.otlp_traces_endpoint!r}"
            )
        one_of("log_level", self.log_level, ("DEBUG", "INFO", "WARNING", "ERROR"))
        for key in POSITIVE_KEYS:
            if getattr(self, key) < 1:
                raise ConfigurationError(f"{key} must be at least 1, got {getattr(self, key)}")
        for key, largest in LARGEST.items():
            if getattr(self, key) > largest:
                raise ConfigurationError(f"{key} must be at most {largest}, got {getattr(self, key)}")
        for key in NOT_NEGATIVE_KEYS:
            if getattr(self, key) < 0:
                raise ConfigurationError(f"{key} must not be negative, got {getattr(self, key)}")
        if self.max_responses_per_second < -1:
            raise ConfigurationError(
                f"max_responses_per_second must be -1 (the default), 0 (no limit) or more, "
                f"got {self.max_responses_per_second}"
            )
        if self.tokens_per_block & (self.tokens_per_block - 1):
            raise ConfigurationError(f"tokens_per_block must be a power of two, got {self.tokens_per_block}")
        if self.kv_cache_dtype == "int8" and self.tokens_per_block in (1, 2):
            # Blocks are copied 16 bytes at a time, those of scales too.
            raise ConfigurationError("kv_cache_dtype int8 needs tokens_per_block to be at least 4, or 0")
        for key in ("kv_cache_free_gpu_mem_fraction", "lora_cache_gpu_memory_fraction"):
            if not 0.0 <= getattr(self, key) <= 1.0:
                raise ConfigurationError(f"{key} must be between 0 and 1, got {getattr(self, key)}")
        if not 0.0 < self.memory_share <= 1.0:
            raise ConfigurationError(f"memory_share must be above 0 and at most 1, got {self.memory_share}")
        if self.kv_cache_host_memory_bytes and not self.enable_kv_cache_reuse:
            raise ConfigurationError(
                "kv_cache_host_memory_bytes needs enable_kv_cache_reuse: blocks in host memory are there to be reused"
            )
        if self.inter_token_latency_target_ms and not self.enable_chunked_context:
            raise ConfigurationError(
                "inter_token_latency_target_ms is kept by smaller chunks of prompts: set enable_chunked_context to "
                "true, or inter_token_latency_target_ms to 0"
            )
        if self.priority_preemption and self.batch_scheduler_policy is SchedulerPolicy.STATIC_BATCH:
            raise ConfigurationError(
                "priority_preemption needs a batch that requests may join: set batch_scheduler_policy to "
                "guaranteed_no_evict or max_utilization, or priority_preemption to false"
            )
        self._check_lookahead()
        if 0 < self.max_num_tokens < self.max_batch_size:
            raise ConfigurationError(
                f"max_num_tokens ({self.max_num_tokens}) must be at least max_batch_size ({self.max_batch_size}): "
                "every running sequence needs one token a step"
            )
        check_ranks(self)

    def _check_lookahead(self) -> None:
        window, ngram, verification = (
            self.lookahead_window_size,
            self.lookahead_ngram_size,
            self.lookahead_verification_set_size,
        )
        if bool(window) != bool(ngram) or (verification and not window):
            raise ConfigurationError(
                "lookahead_window_size, lookahead_ngram_size and lookahead_verification_set_size belong together: set "
                "all of them or none"
            )
        try:
            self.speculative_decoding.lookahead.validate()
        except InvalidRequest as error:
            raise ConfigurationError(str(error)) from None

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], model_directory: str | Path = ".") -> EngineConfig:
        """Build from `config.pbtxt` parameters (key -> string value).

        `model_directory` is the model's version folder, where relative paths start.
        Raises ConfigurationError naming the key and the remedy.
        """
        hints = typing.get_type_hints(cls)
        known = {field.name for field in fields(cls)}
        values: dict[str, object] = {}
        for key, text in parameters.items():
            if not is_set(text) or key in TRITONSERVER_KEYS:
                continue
            if key in UNSUPPORTED_KEYS:
                check_unsupported(key, text)
            elif key in known:
                values[key] = parse(key, text.strip(), hints[key])
            else:
                near = difflib.get_close_matches(key, [*known, *UNSUPPORTED_KEYS], n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigurationError(f"unknown parameter {key}{hint}")
        config = cls(**values)  # type: ignore[arg-type]
        checkpoint = Path(model_directory, config.gpt_model_path)
        tokenizer = Path(model_directory, config.tokenizer_dir) if config.tokenizer_dir else checkpoint
        adapters, draft_model, key_file, kernels = (
            str(Path(model_directory, path)) if path else ""
            for path in (
                config.lora_dir,
                config.speculative_model_dir,
                config.kv_transfer_key_file,
                config.kernel_cache_dir,
            )
        )
        return replace(
            config,
            gpt_model_path=str(checkpoint),
            tokenizer_dir=str(tokenizer),
            lora_dir=adapters,
            speculative_model_dir=draft_model,
            kv_transfer_key_file=key_file,
            kernel_cache_dir=kernels,
        )

    def for_device(self, device_type: str) -> EngineConfig:
        """With the sizes of a step and of a block that suit a type of device, where they are unset. What is set holds,
        and an unset size gives way to it. The ranks call it: only they know the device that auto finds."""
        batch_size, num_tokens, block_size = GPU_SIZES if device_type == "cuda" else CPU_SIZES
        max_batch_size = self.max_batch_size or min(batch_size, self.max_num_tokens or num_tokens)
        return replace(
            self,
            max_batch_size=max_batch_size,
            max_num_tokens=self.max_num_tokens or max(num_tokens, max_batch_size),
            tokens_per_block=self.tokens_per_block or block_size,
        )

    @property
    def max_in_flight(self) -> int:
        """Requests that may be active or waiting at the same time; 0 = no limit. Only after `for_device`."""
        return self.max_batch_size + self.max_queue_size if self.max_queue_size else 0

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt whose blocks can be handed over; 0 = none are."""
        block_size = self.tokens_per_block or CPU_SIZES[-1]  # between GPUs contexts are not handed over
        return self.max_tokens_in_buffer // block_size * block_size

    @property
    def preemption_rows(self) -> int:
        """Rows of the batch, if requests of lower priority have to give way in it; 0 = none has to."""
        return self.max_batch_size if self.priority_preemption else 0

    @property
    def speculative_decoding(self) -> SpeculativeDecodingConfig:
        """Of requests that do not say."""
        lookahead = NO_LOOKAHEAD
        if self.lookahead_window_size:
            lookahead = LookaheadDecodingConfig(
                max_window_size=self.lookahead_window_size,
                max_ngram_size=self.lookahead_ngram_size,
                max_verification_set_size=self.lookahead_verification_set_size,
            )
        return SpeculativeDecodingConfig(
            ngram=NGramDecodingConfig(
                max_draft_len=self.max_draft_len, max_matching_ngram_size=self.max_matching_ngram_size
            ),
            lookahead=lookahead,
            draft_target=DraftTargetDecodingConfig(
                max_draft_len=self.speculative_max_draft_len if self.speculative_model_dir else 0
            ),
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine, of all its replicas."""
        return self.num_replica_ranks * self.data_parallel_size

    @property
    def num_replica_ranks(self) -> int:
        """Ranks of one replica, which are launched together; `distributed.mapping.Mapping` says which does what."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def of_replica(self, replica: int) -> EngineConfig:
        """What the ranks of one replica are launched with: their part of `gpu_device_ids`. They share the machine's
        memory and cores with those of the other replicas, so `data_parallel_size` stays. Raises ConfigurationError."""
        if self.data_parallel_size == 1 or self.executor == "ray":  # in Ray each rank sees one GPU alone
            return self
        devices = self.gpu_device_ids.split(",") if self.gpu_device_ids else list(map(str, range(self.num_ranks)))
        if len(devices) != self.num_ranks:
            raise ConfigurationError(
                f"gpu_device_ids must be one number for each of the {self.num_ranks} ranks, got {self.gpu_device_ids!r}"
            )
        first = replica * self.num_replica_ranks
        return replace(self, gpu_device_ids=",".join(devices[first : first + self.num_replica_ranks]))

    @property
    def launcher(self) -> str:
        """How ranks are started: `executor`, with auto resolved to uniproc or mpi."""
        if self.executor != "auto":
            return self.executor
        return "mpi" if self.num_replica_ranks > 1 else "uniproc"

    @property
    def may_lead_mpi_job(self) -> bool:
        """Whether `executor` leaves it to the environment to start ranks or to lead those of an MPI job."""
        is_one_set = self.num_replica_ranks > 1 and self.data_parallel_size == 1 and not self.spare_ranks
        return self.executor == "auto" and is_one_set

    def to_parameters(self) -> dict[str, str]:
        """The inverse of from_parameters: strings that read back to an equal configuration."""
        return {key: value.value if isinstance(value, Enum) else str(value) for key, value in asdict(self).items()}
