"""What answers requests, whatever dialect they come in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from inflight.asking.prompt_encoder import PromptEncoder
from inflight.asking.sentence_files import Activation
from inflight.asking.served import Served
from inflight.asking.text_prompts import NO_PROMPTS, TextPrompts
from inflight.errors import EngineUnavailable
from inflight.executor.front.front import Front
from inflight.http.call_builder import CallBuilder
from inflight.http.call_runner import CallRunner
from inflight.http.checkpoint_facts import CheckpointFacts
from inflight.http.dispatcher import Dispatcher
from inflight.http.guard import Guard
from inflight.http.model_engine import ModelEngine
from inflight.http.model_names import ModelNames
from inflight.http.pooled_runner import PooledRunner
from inflight.http.text_threads import TextThreads
from inflight.output_config import Pooled, Pooling
from inflight.request_limits import RequestLimits
from inflight.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One model behind one front."""

    engine: ModelEngine
    builder: CallBuilder
    runner: CallRunner
    pooled: PooledRunner
    encoder: PromptEncoder
    tokenizer: Tokenizer
    names: ModelNames
    guard: Guard
    threads: TextThreads
    checkpoint: CheckpointFacts
    fingerprint: Callable[[], str]
    """Tells the engine's, "" = unknown."""
    vector_of: Pooling = "mean"
    """How embeddings are made."""
    score_of: Activation = "sigmoid"
    """What becomes of a score that a network gives."""
    text_prompts: TextPrompts = NO_PROMPTS
    """What stands before texts whose embeddings are made."""
    pooled_by_files: Pooled = ""
    """What its engine will give that generates nothing, as far as the checkpoint's files say."""
    all_models: list[Service] = field(default_factory=list)
    """Those of this server, this one included; empty = there is no other."""

    @property
    def dispatcher(self) -> Dispatcher:
        return self.engine.dispatcher

    @property
    def front(self) -> Front:
        """The engine's; another one after each load."""
        return self.engine.front

    @property
    def every(self) -> list[Service]:
        """The models of this server, in the order in which clients see them."""
        return self.all_models or [self]

    def find(self, model: str) -> Service | None:
        """The model of this server that has this name, or the adapter."""
        return next((each for each in self.every if each.names.knows(model)), None)

    @property
    def known_limits(self) -> RequestLimits | None:
        """None of an engine that has not been loaded yet."""
        try:
            return self.limits
        except EngineUnavailable:
            return None

    @property
    def max_model_len(self) -> int | None:
        """None of an engine that has not been loaded yet."""
        limits = self.known_limits
        return None if limits is None else limits.max_seq_len

    @property
    def pools(self) -> str:
        """What its engine gives that generates nothing, see RequestLimits."""
        limits = self.known_limits
        return self.pooled_by_files if limits is None else limits.pooled

    @property
    def limits(self) -> RequestLimits:
        """Those of the engine that serves now."""
        return self.front.limits

    @property
    def served(self) -> Served:
        return self.builder.served
