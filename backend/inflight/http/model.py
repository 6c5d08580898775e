"""One model of a server: all that does not depend on its engine, read and checked before that is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inflight.asking.chat_renderer import ChatRenderer
from inflight.asking.chat_template import ChatTemplate
from inflight.asking.chats import Chats
from inflight.asking.images import Images
from inflight.asking.pair_template import find_pair_template
from inflight.asking.prompt_encoder import PromptEncoder
from inflight.asking.sentence_files import find_activation, find_pooling, find_prompts
from inflight.asking.served import Served
from inflight.asking.tool_use import choose_reasoning_parser, choose_tool_parser
from inflight.checkpoint_digest import system_fingerprint
from inflight.config import EngineConfig
from inflight.guided_decoding import GuidedDecodingParams
from inflight.http.call_builder import CallBuilder
from inflight.http.call_runner import CallRunner
from inflight.http.checkpoint_facts import CheckpointFacts
from inflight.http.guard import Guard
from inflight.http.metrics import ModelMetrics
from inflight.http.model_engine import ModelEngine
from inflight.http.model_names import ModelNames
from inflight.http.pooled_runner import PooledRunner
from inflight.http.room import Needs
from inflight.http.service import Service
from inflight.http.text_threads import TextThreads
from inflight.openai_options import OpenAIOptions
from inflight.request_spans import RequestSpans
from inflight.text.tokenizer import Tokenizer
from inflight.weight_bytes import host_bytes


class Model:
    def __init__(self, options: OpenAIOptions, config: EngineConfig, tokenizer: Tokenizer | None = None) -> None:
        """`options`: as those of a server of this model alone. `tokenizer`: None = the checkpoint's. Raises
        ConfigurationError."""
        folder = config.tokenizer_dir or config.gpt_model_path
        self.options = options
        self.config = config
        self._tokenizer = tokenizer or Tokenizer.load(folder, config.gpt_model_path)
        self._encoder = PromptEncoder(self._tokenizer, config.max_text_bytes, find_pair_template(config))
        self._renderer = ChatRenderer(ChatTemplate.load(Path(folder)), frozenset(options.chat_template_kwargs))
        self._checkpoint = CheckpointFacts.read(Path(config.gpt_model_path))
        self._tool_parser, self.tools_note = choose_tool_parser(
            options.tool_parser,
            self._renderer.tool_families,
            knows_tools=self._renderer.knows_tools,
            model_type=self._checkpoint.model_type,
        )
        self._reasoning_parser = choose_reasoning_parser(options.reasoning_parser, self._tool_parser)
        checkpoint, pooling = Path(config.gpt_model_path), options.embedding_pooling
        self._vector_of = pooling or find_pooling(checkpoint)
        self._score_of = find_activation(checkpoint)
        self._text_prompts = find_prompts(checkpoint, is_pooling_set=bool(pooling))
        self.images: Images | None = None
        """Once it has a service; to be closed."""

    @property
    def needs(self) -> Needs:
        """What its engine takes of the host."""
        num_threads = self.config.num_threads * self.config.num_ranks
        return Needs(num_bytes=host_bytes(self.config), num_threads=num_threads)

    def service(
        self,
        engine: ModelEngine,
        threads: TextThreads,
        metrics: ModelMetrics,
        guard: Guard,
        spans: RequestSpans | None,
        others: Sequence[str] = (),
    ) -> Service:
        """What answers requests by this engine, which is open. `others`: names of the server's other models."""
        options, config, dispatcher = self.options, self.config, engine.dispatcher

        def check_text(name: str, params: GuidedDecodingParams, text: str) -> None:
            dispatcher.front.check_text(name, params, text)

        def fingerprint() -> str:
            return system_fingerprint((config.gpt_model_path, config.tokenizer_dir), dispatcher.front.description)

        self.images = Images.of(config, self._tokenizer, lambda: dispatcher.front.description.embedding_type)
        chats = Chats(
            self._tokenizer,
            self._encoder,
            self._renderer,
            tool_parser=self._tool_parser,
            reasoning_parser=self._reasoning_parser,
            check_text=check_text if config.guided_decoding_check else None,
            images=self.images,
        )
        defaults, seconds = dispatcher.front.generation_defaults, options.max_request_seconds
        served = Served(self._tokenizer, defaults, self._encoder, chats, max_request_seconds=seconds)
        return Service(
            engine=engine,
            builder=CallBuilder(served, self._tokenizer, fingerprint),
            runner=CallRunner(dispatcher, threads, metrics, spans),
            pooled=PooledRunner(dispatcher, threads, metrics),
            encoder=self._encoder,
            tokenizer=self._tokenizer,
            names=ModelNames(options.model_names, config.gpt_model_path, config.lora_dir, others),
            guard=guard,
            threads=threads,
            checkpoint=self._checkpoint,
            fingerprint=fingerprint,
            vector_of=self._vector_of,
            score_of=self._score_of,
            text_prompts=self._text_prompts,
            pooled_by_files=options.pooled,
        )

    def rest(self) -> None:
        """Its engine has been unloaded, and nobody needs what else was started for it."""
        if self.images is not None:
            self.images.rest()
