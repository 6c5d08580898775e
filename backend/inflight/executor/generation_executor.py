"""The engine as a library: prompts as text, token ids or embeddings in, results to wait for or to iterate over out.

    with GenerationExecutor.create("path/to/checkpoint") as executor:
        for output in executor.generate_async("Once upon a time", max_tokens=32, streaming=True):
            print(output.text_diff, end="", flush=True)

Knows text; does not know how ranks are started or reached, nor how responses come to their results.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from msgspec import structs
from typing_extensions import Self

from inflight.asking.limit import Limit
from inflight.asking.prompt_encoder import PromptEncoder
from inflight.asking.refusal import Refusal
from inflight.asking.served import Served
from inflight.asking.vectors import Row, row_among
from inflight.config import EngineConfig
from inflight.errors import InvalidRequest, RequestTimedOut
from inflight.executor import progress as bars
from inflight.executor.executor import Executor, resolve_config
from inflight.executor.front.front import Front
from inflight.executor.front.generation_result import GenerationResult
from inflight.executor.front.library_ask import WORDS, library_ask
from inflight.executor.front.make_sequences import make_sequences
from inflight.executor.front.prompt import Prompt, PromptReader
from inflight.executor.front.prompt_adapters import PromptAdapterRequest
from inflight.executor.front.request_output import RequestOutput
from inflight.executor.postprocess.workers import StartWorkers, plan_workers
from inflight.executor.result_dispatcher import ResultDispatcher
from inflight.executor.send_all import send_all
from inflight.executor.text_pooling import TextPooling, pairs_of
from inflight.kv_cache_events import KVCacheEvent
from inflight.lora import LoRARequest
from inflight.output_config import Pooling
from inflight.prompt_tuning import EmbeddingTable, PromptTuningConfig
from inflight.request import Request
from inflight.sampling import Sampling
from inflight.sampling_config import SamplingConfig
from inflight.stats import IterationStats
from inflight.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from inflight.asking.pair_template import PairTemplate

STATS_SECONDS = 0.05
"""Interval at which `aget_stats` looks for statistics: they come in batches at about this interval."""

T = TypeVar("T")


class GenerationExecutor:
    """Safe to use from several threads."""

    def __init__(
        self,
        executor: Front,
        tokenizer: Tokenizer | None = None,
        *,
        start_workers: StartWorkers | None = None,
        checkpoint: Path | None = None,
        embedding_pooling: Pooling | None = None,
        pair_template: PairTemplate | None = None,
    ) -> None:
        """Use `executor` alone from now on, start it unless it has been, and shut it down at the end. Without a
        `tokenizer` prompts are token ids and outputs have no text. `start_workers`: of processes that make the text;
        None = the threads that read it do. `checkpoint`: the engine's folder, whose files say how `embed` and `score`
        make vectors and scores, unless `embedding_pooling` does. `pair_template`: what a language model that scores
        texts reads of two; None = the tokenizer joins them. Raises ConfigurationError."""
        self._executor = executor.__enter__()
        try:
            self._dispatcher = ResultDispatcher(executor, start_workers)
        except BaseException:
            executor.shutdown()
            raise
        self._tokenizer = tokenizer
        encoder = PromptEncoder(tokenizer, pair_template=pair_template)
        self._prompts = PromptReader(encoder)
        self._served = Served(tokenizer, executor.generation_defaults, encoder)
        self._checkpoint, self._embedding_pooling = checkpoint, embedding_pooling

    @classmethod
    def create(
        cls,
        model_path: str | os.PathLike[str] | None = None,
        config: EngineConfig | None = None,
        *,
        skip_tokenizer_init: bool = False,
        num_postprocess_workers: int = 0,
        embedding_pooling: Pooling | None = None,
        progress: bool | None = None,
        **options: Any,
    ) -> Self:
        """Launch an engine of one's own and wait until it serves.

        `model_path`, `config` and further `options`: see Executor. `skip_tokenizer_init`: load no tokenizer, for
        checkpoints that have none. `num_postprocess_workers`: processes that make text of tokens, with a tokenizer;
        0 = the threads that read results do. `embedding_pooling`: how `embed` makes vectors; None = as
        sentence-transformers' files in the checkpoint say, else the mean. `progress`: whether to show a bar while it
        loads; None = if standard error is a terminal. Raises ConfigurationError.
        """
        config = resolve_config(model_path, config)
        tokenizer, start_workers, pair_template = None, None, None
        if not skip_tokenizer_init:
            tokenizer_dir = config.tokenizer_dir or config.gpt_model_path
            tokenizer = Tokenizer.load(tokenizer_dir, config.gpt_model_path)
            start_workers = plan_workers(num_postprocess_workers, tokenizer_dir, config.gpt_model_path)
            from inflight.asking.pair_template import find_pair_template  # which loads jinja2

            pair_template = find_pair_template(config)
        with bars.loading(config.gpt_model_path, shown=progress):
            executor = Executor(config=config, **options)
        return cls(
            executor,
            tokenizer,
            start_workers=start_workers,
            checkpoint=Path(config.gpt_model_path),
            embedding_pooling=embedding_pooling,
            pair_template=pair_template,
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What turns prompts into tokens and outputs into text, if there is one."""
        return self._tokenizer

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        *,
        prompt: str | None = None,
        stop: Sequence[str] = (),
        arrival_time: float | None = None,
    ) -> GenerationResult:
        """Send a request as it is and return at once.

        `prompt`: the text that its tokens were made of, for the outputs. `stop`: texts that end a sequence and are cut
        off, wherever the borders of tokens lie. `arrival_time`: repeated in the outputs. Raises what
        Executor.enqueue_request raises.
        """
        if stop and request.sampling_config.beam_width > 1:
            raise InvalidRequest("stop is not supported together with beam_width above 1: use stop_words")
        streaming = request.streaming
        request = structs.replace(
            request,
            request_id=request.request_id or self._executor.next_request_id(),
            # Stop strings are found here, in text: tokens must come as they are generated to end the request.
            streaming=request.streaming or bool(stop),
            # Outputs hold all tokens anyway.
            return_all_generated_tokens=False,
        )
        self._executor.limits.validate(request)  # before a tokenizer reads its tokens
        result = GenerationResult(
            request,
            self._executor.cancel_request,
            abort_sequence=self._executor.cancel_sequence,
            prompt=prompt,
            streaming=streaming,
            sequences=make_sequences(request, stop, self._tokenizer, reads_text=self._dispatcher.workers is None),
            arrival_time=arrival_time,
        )
        self._dispatcher.send(request, result, stop)
        return result

    def generate_async(
        self,
        prompt: Prompt,
        *,
        max_tokens: int,
        sampling_config: SamplingConfig | None = None,
        streaming: bool = False,
        stop: Sequence[str] = (),
        end_ids: list[int] | None = None,
        query_token_ids: list[int] | None = None,
        prompt_tuning_config: PromptTuningConfig | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        arrival_time: float | None = None,
        **options: Any,
    ) -> GenerationResult:
        """Send a prompt, text, token ids or embeddings, and return at once.

        `max_tokens`: of each sequence. `sampling_config`: how tokens are chosen; None = as the checkpoint has it (see
        `sampling_config`). `streaming`: whether iterating over the result yields partial outputs. `stop`: see submit.
        `end_ids`: tokens that end a sequence; None = the tokenizer's. `query_token_ids`: tokens to stand behind the
        prompt, their context, which queries share in the cache. `prompt_tuning_config`: embeddings of token ids beyond
        the vocabulary. `prompt_adapter_request`: a soft prompt to stand before the prompt. `arrival_time`: of the
        request at the program, on a clock of its own; repeated in the outputs, it decides nothing. `options`: further
        fields of Request. Raises what Executor.enqueue_request raises, and InvalidRequest for text without a tokenizer.
        """
        try:
            token_ids, tuning = self._prompts.read(
                prompt,
                self._executor.limits,
                adapter=prompt_adapter_request,
                query_token_ids=query_token_ids,
                tuning=prompt_tuning_config,
            )
            ask = library_ask(
                token_ids,
                max_tokens=max_tokens,
                sampling=sampling_config,
                streaming=streaming,
                end_ids=end_ids,
                fields=options if tuning is None else {"prompt_tuning_config": tuning, **options},
            )
            request = self._served.prepare(ask, self._executor.limits).prompts[0].request
        except Refusal as refusal:
            raise InvalidRequest(refusal.said(WORDS)) from None
        text = prompt if isinstance(prompt, str) else None
        return self.submit(request, prompt=text, stop=stop, arrival_time=arrival_time)

    @overload
    def generate(
        self,
        prompts: Prompt,
        *,
        max_tokens: int,
        sampling_config: SamplingConfig | None = None,
        progress: bool | None = None,
        **options: Any,
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]] | list[EmbeddingTable],
        *,
        max_tokens: int | list[int],
        sampling_config: SamplingConfig | list[SamplingConfig] | None = None,
        progress: bool | None = None,
        **options: Any,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]] | list[EmbeddingTable],
        *,
        max_tokens: int | list[int],
        sampling_config: SamplingConfig | list[SamplingConfig] | None = None,
        progress: bool | None = None,
        **options: Any,
    ) -> RequestOutput | list[RequestOutput]:
        """Send one prompt or a list of prompts and wait for the outputs, in the order of the prompts.

        For a list, `max_tokens` and `sampling_config` may be lists of one for each prompt, and a bar is shown if
        `progress` is true, or None and standard error is a terminal. `options`: see generate_async. If a request fails
        its error is raised, and the others are aborted.
        """
        if isinstance(prompts, str | EmbeddingTable) or (prompts and isinstance(prompts[0], int)):
            single: Any = prompts
            return self._generate([single], max_tokens, sampling_config, progress=False, options=options)[0]
        several: Any = prompts
        return self._generate(several, max_tokens, sampling_config, progress=progress, options=options)

    def _generate(
        self,
        prompts: list[Prompt],
        max_tokens: int | list[int],
        sampling_config: SamplingConfig | list[SamplingConfig] | None,
        *,
        progress: bool | None,
        options: dict[str, Any],
    ) -> list[RequestOutput]:
        lengths: list[Any] = _one_each("max_tokens", max_tokens, len(prompts))
        configs = _one_each("sampling_config", sampling_config, len(prompts))
        with bars.counting("Generating", len(prompts), shown=progress) as advance:
            sends = [
                partial(self.generate_async, prompt, max_tokens=length, sampling_config=config, **options)
                for prompt, length, config in zip(prompts, lengths, configs, strict=True)
            ]
            results = send_all(sends, advance)
            return [result.result() for result in results]

    # -- vectors and scores --------------------------------------------------------------------------------------------

    def embed(
        self,
        texts: str | Sequence[str] | Sequence[list[int]],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        input_type: str | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[Row]:
        """The vector of each text, or row of token ids: float32 of length 1, [`dimensions`] or [hidden size].

        `prompt_name`, `input_type`: which of the model's prompts stands before each text, as for /v1/embeddings.
        `truncate_prompt_tokens`: see Limit. Raises InvalidRequest, ConfigurationError for a checkpoint whose files ask
        for what is not computed, and what waiting for a result raises.
        """
        prompts: list[Any] = [texts] if isinstance(texts, str) else [*texts]
        return self._pooling.embed(
            prompts,
            self._executor.limits,
            dimensions=dimensions,
            prompt_name=prompt_name,
            input_type=input_type,
            limit=Limit(truncate_prompt_tokens=truncate_prompt_tokens),
            adapter=lora_request,
        )

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[float]:
        """How well each document answers the query, or each the query at its place: a cross-encoder's score of both,
        of any other model the cosine of their vectors.

        `use_activation`: False = a cross-encoder's scores as they are. For the others and for errors see `embed`.
        """
        return self._pooling.score(
            pairs_of(query, documents),
            self._executor.limits,
            use_activation=use_activation,
            limit=Limit(truncate_prompt_tokens=truncate_prompt_tokens),
            adapter=lora_request,
        )

    @cached_property
    def _pooling(self) -> TextPooling:
        if self._checkpoint is None:
            raise InvalidRequest("how vectors and scores are made stands in the checkpoint: give `checkpoint`")
        return TextPooling(self._served, self._rows, self._checkpoint, self._embedding_pooling)

    def _rows(self, requests: list[Request]) -> list[Row]:
        results = send_all([partial(self.submit, request) for request in requests])
        rows = [row_among(result.tensors()) for result in results]
        if any(row is None for row in rows):
            raise RequestTimedOut("the engine's time for this request was over, or it was shut down")
        return [row for row in rows if row is not None]

    # -- adapters ------------------------------------------------------------------------------------------------------

    def load_lora(self, lora_request: LoRARequest) -> None:
        """Load an adapter now, and wait for it: a later request with it need not. It may be dropped while no request
        uses it, and is then read again. Raises InvalidRequest if it is none, or does not fit the network."""
        self._order_lora(lora_request, "load")

    def unload_lora(self, lora_request: LoRARequest) -> None:
        """Forget an adapter, so that its name may stand for another one; requests that use it already keep it. Raises
        InvalidRequest if it is not loaded."""
        self._order_lora(lora_request, "unload")

    def _order_lora(self, lora_request: LoRARequest, order: Literal["load", "unload"]) -> None:
        request = Request(input_token_ids=[], max_tokens=1, lora_request=lora_request, lora_order=order)
        self.submit(request).result()

    def abort_request(self, request: int | GenerationResult) -> None:
        """Ask for an early end of a request, given by its id or its result. It ends with the tokens generated until
        then; unknown ids are ignored."""
        self._executor.cancel_request(request if isinstance(request, int) else request.request_id)

    def sampling_config(self, prompt_token_ids: list[int], max_tokens: int, **said: Any) -> SamplingConfig:
        """The checkpoint's own way to choose tokens, but for what is `said`: see GenerationDefaults."""
        defaults, count = self._executor.generation_defaults, len(prompt_token_ids)
        return defaults.sampling_config(Sampling(**said), num_prompt_tokens=count, max_tokens=max_tokens)

    # -- statistics ----------------------------------------------------------------------------------------------------

    def get_stats(self, timeout: float = 0.0) -> list[IterationStats]:
        """Statistics of the iterations since the last call, oldest first, after waiting up to `timeout` seconds for the
        first. At most the last `iter_stats_max_iterations`."""
        return self._executor.get_latest_iteration_stats(timeout)

    async def aget_stats(self, timeout: float | None = None) -> AsyncIterator[IterationStats]:
        """The same one by one as they come, until the engine is shut down or none has come for `timeout` seconds."""
        async for stats in self._as_they_come(self.get_stats, timeout):
            yield stats

    def get_kv_events(self, timeout: float = 0.0) -> list[KVCacheEvent]:
        """What happened to the cached blocks since the last call, oldest first, after waiting up to `timeout` seconds
        for the first. At most the last `event_buffer_max_size`; see inflight.kv_cache_events."""
        return self._executor.get_kv_cache_events(timeout)

    async def aget_kv_events(self, timeout: float | None = None) -> AsyncIterator[KVCacheEvent]:
        """The same one by one as they come, until the engine is shut down or none has come for `timeout` seconds."""
        async for event in self._as_they_come(self.get_kv_events, timeout):
            yield event

    async def _as_they_come(self, take: Callable[[], list[T]], timeout: float | None) -> AsyncIterator[T]:
        last = time.monotonic()
        while True:
            is_open = self._executor.can_enqueue_requests()
            for item in take():
                yield item
                last = time.monotonic()
            if not is_open or (timeout is not None and time.monotonic() - last > timeout):
                return
            await asyncio.sleep(STATS_SECONDS)

    # -- the end -------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Shut the engine down and wait for its end; requests in flight fail with EngineUnavailable."""
        self._executor.shutdown()
        self._dispatcher.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()


def _one_each(name: str, value: T | list[T] | None, count: int) -> list[T | None]:
    """`value` for each of `count` prompts, or the list of them."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts")
    return [*value]
