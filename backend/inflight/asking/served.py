"""One model of a server: makes requests of what clients want of it.

All the work that grows with a request's text is done here, on a thread of the caller's. Every request that is made here
can be served.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from msgspec import structs

from inflight.asking.ask import Ask, Prompt
from inflight.asking.chat import Chat
from inflight.asking.chat_format import ChatFormat
from inflight.asking.prepared import Prepared, PreparedPrompt, engines_refusal
from inflight.asking.prompt_encoder import PromptEncoder
from inflight.asking.reasoning import reasoning_style
from inflight.asking.reasoning_tokens import ReasoningTokens
from inflight.asking.refusal import Refusal, context_too_long, unsupported
from inflight.asking.tool_use import CheckText, ToolUse, read_tools
from inflight.asking.tools.parser import tool_tags
from inflight.errors import InvalidRequest
from inflight.generation_defaults import GenerationDefaults
from inflight.guided_decoding import GuidedDecodingParams
from inflight.guides.requests import not_enforced, with_grammar
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.text.detokenizer import Detokenizer
from inflight.text.stop_strings import StopStrings
from inflight.text.text_decoder import make_text_decoder, prompt_text
from inflight.text.tokenizer import Tokenizer

MAX_COPIED_BYTES = 2**26
"""Of what all prompts of an `Ask` share and each brings to the engine."""
ENTRY_BYTES = 256
"""What a word or a bias counts of that, because of the time that each takes on its way: 2000 words take 20 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all prompts of an `Ask` have in common, made once: a short body may have a thousand of them."""

    bad_words: list[list[int]]
    embedding_bias: bytes
    end_ids: list[int]
    stop_strings: StopStrings | None
    guide: GuidedDecodingParams | None = None
    guide_field: str = ""


class Served:
    """Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        encoder: PromptEncoder,
        defaults: GenerationDefaults,
        *,
        max_request_seconds: float = 0.0,
        tool_parser: str = "",
        reasoning_parser: str = "",
        check_text: CheckText | None = None,
    ) -> None:
        """`tool_parser`, `reasoning_parser`: families whose text the checkpoint writes, "" = none. `check_text`: of
        calls' arguments, None = nobody checks them. Raises ConfigurationError."""
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._defaults = defaults
        self._max_request_ms = math.ceil(max_request_seconds * 1000)
        self._tool_parser = tool_parser
        self._reasoning = reasoning_style(reasoning_parser) if reasoning_parser else None
        self._check_text = check_text
        self._special_texts = frozenset(filter(None, map(tokenizer.token, tokenizer.special_ids)))
        self._tag_ids = self._special_ids(
            tool_tags(tool_parser) if tool_parser else (), () if self._reasoning is None else self._reasoning.tags
        )

    @property
    def splits_reasoning(self) -> bool:
        """Whether the operator has said how the model marks its reasoning."""
        return self._reasoning is not None

    def prepare(self, ask: Ask, limits: RequestLimits) -> Prepared:
        """Raises Refusal."""
        if isinstance(ask.prompt, Chat):
            return self._prepare_chat(ask, ask.prompt, limits)
        shared = self._with_guide(self._shared(ask, limits, len(ask.prompt)), ask)
        prompts = []
        for prompt in ask.prompt:
            token_ids = self._encoder.encode(prompt, limits, add_special_tokens=ask.adds_special_tokens)
            prompts.append(self._prompt(ask, token_ids, limits, shared, prompt))
        return self._prepared(prompts, shared, limits)

    def count_tokens(self, chat: Chat, limits: RequestLimits) -> int:
        """Of the prompt that a chat makes. Raises Refusal."""
        self._tools(chat, None)
        return len(self._encoder.encode_chat(chat, limits)[1])

    def _prepare_chat(self, ask: Ask, chat: Chat, limits: RequestLimits) -> Prepared:
        use = self._tools(chat, ask)
        text, token_ids = self._encoder.encode_chat(chat, limits)
        format = self._format(ask, use, text)
        shared = self._with_guide(self._shared(ask, limits, 1), ask, use)
        if shared.guide is not None and format is not None:
            is_of_calls = shared.guide_field != "guide"
            shared = replace(shared, guide=self._with_tags(shared.guide, text, is_of_calls=is_of_calls))
        shown = frozenset[int]() if format is None else self._tag_ids
        prompt = self._prompt(ask, token_ids, limits, shared, shown=shown)
        counter = None
        if format is not None and format.make_splitter is not None:
            make_splitter, ids = format.make_splitter, prompt.request.input_token_ids

            def counter() -> ReasoningTokens:
                return ReasoningTokens(make_text_decoder(self._tokenizer, ids, shown=self._tag_ids), make_splitter())

        return replace(self._prepared([prompt], shared, limits), format=format, make_reasoning_tokens=counter)

    @staticmethod
    def _prepared(prompts: list[PreparedPrompt], shared: Shared, limits: RequestLimits) -> Prepared:
        left_out = not_enforced(shared.guide, limits)
        return Prepared(prompts=prompts, guide_field=shared.guide_field, not_enforced=left_out)

    # -- chats ---------------------------------------------------------------------------------------------------------

    def _tools(self, chat: Chat, ask: Ask | None) -> ToolUse | None:
        answer = None if ask is None or ask.guide is None else ask.guide.form
        knows_tools = self._encoder.knows_tools
        return read_tools(chat, self._tool_parser, answer, self._special_texts, knows_tools=knows_tools)

    def _format(self, ask: Ask, use: ToolUse | None, prompt: str) -> ChatFormat | None:
        """`prompt`: the text that the template has made."""
        style, hides = self._reasoning, not ask.show.reasoning
        if hides and style is None:
            raise unsupported("shows_reasoning", "it needs the operator's setting reasoning_parser")
        if hides and (ask.show.output.return_log_probs or ask.show.token_ids):
            sentence = "{0} false hides tokens that {1} and {2} show: leave those out"
            raise Refusal("shows_reasoning", sentence, "log_probs", "token_ids")
        if style is None and (use is None or not use.parser):
            return None
        return replace(
            ChatFormat() if use is None else use.format(self._check_text),
            make_splitter=None if style is None else style.splitter_maker(prompt),
            includes_reasoning=not hides,
        )

    def _with_tags(self, guide: GuidedDecodingParams, prompt: str, *, is_of_calls: bool) -> GuidedDecodingParams:
        """The grammar as that of the answer: the model may think before it, unless the prompt says that it has, and
        tags that are special tokens are text."""
        style = self._reasoning
        reasoning = None if style is None else style.thought(prompt, is_of_calls=is_of_calls)
        return structs.replace(guide, reasoning=reasoning, shown_token_ids=tuple(sorted(self._tag_ids)))

    def _special_ids(self, *tags: Iterable[str]) -> frozenset[int]:
        """The special tokens that are tags."""
        texts, tokenizer = set(chain(*tags)), self._tokenizer
        return frozenset(token for token in tokenizer.special_ids if tokenizer.token(token) in texts)

    # -- requests ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _with_guide(shared: Shared, ask: Ask, use: ToolUse | None = None) -> Shared:
        """That of the answer, or of calls in its place or besides it."""
        field, guide = "guide", None if ask.guide is None else ask.guide.params
        if use is not None and use.guide is not None:
            field = "tool_choice" if use.is_forced else "tools"
            if guide is not None and not use.has_answer_form:
                raise Refusal(field, "{1} and {0} are two grammars for one output: give one of them", "guide")
            guide = use.guide
        if guide is None:
            if ask.white_space is not None:
                raise Refusal("white_space", "{0} says how JSON is written, and no field asks for any")
            return shared
        if ask.white_space is not None:
            guide = structs.replace(guide, white_space=ask.white_space)
        return replace(shared, guide=guide, guide_field=field)

    def _shared(self, ask: Ask, limits: RequestLimits, num_prompts: int) -> Shared:
        sampling, stop = ask.sampling, ask.stop
        bad_words = self._tokenizer.encode_spellings(sampling.bad_words)
        embedding_bias = sampling.embedding_bias(limits.vocab_size)
        num_bytes = ENTRY_BYTES * (len(bad_words) + len(sampling.logit_bias)) + len(embedding_bias)
        if num_prompts > 1 and num_prompts * num_bytes > MAX_COPIED_BYTES:
            raise Refusal(
                "prompt",
                "with these {1}, {2} and {3} {0} may have {most} entries, got {count}",
                *("bad_words", "logit_bias", "allowed_token_ids"),
                most=max(MAX_COPIED_BYTES // num_bytes, 1),
                count=num_prompts,
            )
        return Shared(
            bad_words=bad_words,
            embedding_bias=embedding_bias,
            end_ids=self._end_ids(ask, limits.vocab_size),
            stop_strings=StopStrings([*stop.texts]) if stop.texts else None,
        )

    def _end_ids(self, ask: Ask, vocab_size: int) -> list[int]:
        named = ask.stop.token_ids
        own = self._tokenizer.end_ids_below(vocab_size) if ask.stop.ends_by_itself else []
        if not all(0 <= token < vocab_size for token in named):
            raise Refusal("stop_token_ids", "{0} must hold token ids from 0 to {last}", last=vocab_size - 1)
        return list(dict.fromkeys([*own, *named]))

    def _prompt(
        self,
        ask: Ask,
        token_ids: list[int],
        limits: RequestLimits,
        shared: Shared,
        prompt: Prompt = "",
        *,
        shown: frozenset[int] = frozenset(),
    ) -> PreparedPrompt:
        """`shown`: special tokens that have text whatever the client says."""
        request = self._request(ask, token_ids, limits, shared)
        text, ids = "", request.input_token_ids
        if ask.show.prompt:
            is_whole = isinstance(prompt, str) and len(ids) == len(token_ids)
            text = str(prompt) if is_whole else prompt_text(self._tokenizer, ids)
        make = partial(self._detokenizer, ask, request, shared.stop_strings, shown)
        return PreparedPrompt(request=request, make_detokenizer=make, text=text)

    def _detokenizer(
        self, ask: Ask, request: Request, stop_strings: StopStrings | None, shown: frozenset[int]
    ) -> Detokenizer:
        decoder = make_text_decoder(
            self._tokenizer, request.input_token_ids, shows_special=ask.show.special_tokens, shown=shown
        )
        min_tokens = request.sampling_config.min_tokens
        return Detokenizer(decoder, stop_strings, min_tokens, keeps_stop_string=ask.stop.is_kept)

    def _request(self, ask: Ask, token_ids: list[int], limits: RequestLimits, shared: Shared) -> Request:
        limit, asked = ask.limit, ask.limit.max_tokens
        # The last token is sampled but never computed.
        context = min(limits.max_seq_len, limits.kv_cache_tokens + 1)
        fits = min(limits.max_input_len, context - (asked or 1))
        token_ids = _truncated(limit.truncate_prompt_tokens, token_ids, fits)
        room = context - len(token_ids)
        if room < 1 or len(token_ids) > limits.max_input_len:
            raise context_too_long(context, len(token_ids))
        if asked is not None and asked > room:
            raise context_too_long(context, len(token_ids), "max_tokens", asked)
        max_tokens = asked or min(limit.default or room, room)
        try:
            request = Request(
                input_token_ids=token_ids,
                max_tokens=max_tokens,
                # Stop strings are found in text: the engine must send every token at once so that it can be stopped.
                streaming=ask.streaming or bool(ask.stop.texts),
                sampling_config=ask.sampling.config(
                    self._defaults,
                    num_prompt_tokens=len(token_ids),
                    max_tokens=max_tokens,
                    embedding_bias=shared.embedding_bias,
                ),
                output_config=ask.show.output,
                end_ids=shared.end_ids,
                bad_words=shared.bad_words,
                guided_decoding_params=shared.guide,
                priority=ask.priority,
                allotted_time_ms=min(filter(None, [limit.allotted_time_ms, self._max_request_ms]), default=0),
                cache_salt=ask.cache_salt,
                num_return_sequences=ask.choices,
                lora_request=ask.adapter,
            )
            limits.validate(request)
            return with_grammar(request, limits)
        except InvalidRequest as error:
            raise engines_refusal(str(error), shared.guide_field) from None


def _truncated(count: int | None, token_ids: list[int], most: int) -> list[int]:
    if count is None:
        return token_ids
    if count < -1 or count == 0:
        raise Refusal("truncate_prompt_tokens", "{0} must be -1 or at least 1, got {count}", count=count)
    kept = most if count == -1 else count
    return token_ids[-kept:] if kept > 0 else token_ids
