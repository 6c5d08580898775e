"""Bodies to calls: prompts become tokens, and fields become what the engine takes.

All the work that grows with a request's text is done here, on a thread of its own. Every engine request that it makes
can be served; raises APIError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain

from msgspec import structs

from inflight.errors import InvalidRequest
from inflight.generation_defaults import GenerationDefaults
from inflight.guided_decoding import GuidedDecodingParams
from inflight.guides.requests import not_enforced, with_grammar
from inflight.lora import LoRARequest
from inflight.openai.api_error import context_too_long, invalid, unsupported
from inflight.openai.bounded_fields import read_request_id, read_salt, read_stops, read_words
from inflight.openai.call import Call, PromptCall
from inflight.openai.chat_format import ChatFormat
from inflight.openai.choice import Choice
from inflight.openai.fields import Body, ChatBody, CompletionBody, check_fields, check_stream_options
from inflight.openai.guides import OF_CALLS, Found, check_backend, read_guide
from inflight.openai.log_probs import LogProbWriter
from inflight.openai.param_names import ParamNames
from inflight.openai.prompts import PromptEncoder, split_prompts
from inflight.openai.reasoning import reasoning_style
from inflight.openai.reasoning_tokens import ReasoningTokens
from inflight.openai.sampling import Biases, engine_priority, read_biases, sampling_config
from inflight.openai.tool_use import CheckText, ToolUse, read_tools
from inflight.openai.tools.parser import tool_tags
from inflight.output_config import OutputConfig
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.text.detokenizer import Detokenizer
from inflight.text.stop_strings import StopStrings
from inflight.text.text_decoder import make_text_decoder, prompt_text
from inflight.text.token_texts import TokenTexts
from inflight.text.tokenizer import Tokenizer

COMPLETION_TOKENS = 16
"""New tokens of a completion that does not say, as OpenAI has it. A chat takes the rest of the context."""
MAX_CHOICES = 128
MAX_COPIED_BYTES = 2**26
"""Of what all prompts of a body share and each brings to the engine."""
ENTRY_BYTES = 256
"""What a word or a bias counts of that, because of the time that each takes on its way: 2000 words take 20 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all prompts of a body have in common, made once: a short body may have a thousand of them."""

    output: OutputConfig
    adapter: LoRARequest | None
    biases: Biases
    bad_words: list[list[int]]
    end_ids: list[int]
    guide: GuidedDecodingParams | None
    param_names: ParamNames
    stop_strings: StopStrings | None


class CallBuilder:
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
        fingerprint: Callable[[], str] = str,
        check_text: CheckText | None = None,
    ) -> None:
        """`tool_parser`, `reasoning_parser`: families whose text the checkpoint writes, "" = none. `fingerprint`: tells
        the engine's, "" = unknown. `check_text`: of calls' arguments, None = nobody checks them. Raises
        ConfigurationError."""
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._defaults = defaults
        self._texts = TokenTexts(tokenizer)
        self._tool_parser = tool_parser
        self._reasoning = reasoning_style(reasoning_parser) if reasoning_parser else None
        self._special_texts = frozenset(filter(None, map(tokenizer.token, tokenizer.special_ids)))
        self._tag_ids = self._special_ids(
            tool_tags(tool_parser) if tool_parser else (), () if self._reasoning is None else self._reasoning.tags
        )
        self._fingerprint = fingerprint
        self._check_text = check_text
        self._max_request_ms = math.ceil(max_request_seconds * 1000)

    def chat(self, body: ChatBody, limits: RequestLimits, model: str, adapter: LoRARequest | None) -> Call:
        check_fields(body)
        includes_usage = check_stream_options(body)
        use, text, token_ids = self._chat_prompt(body, limits)
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
        output = _output_config(body.top_logprobs or 0) if body.logprobs else OutputConfig()
        wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        format = self._chat_format(body, use, text)
        found = read_guide(body) if use is None else read_guide(body, use.guide, is_forced=use.is_forced)
        if found is not None and format is not None:
            found = found[0], self._with_tags(found[1], text, is_of_calls=found[0] in OF_CALLS)
        shared = self._shared(body, limits, 1, output, found, adapter)
        request = self._request(body, token_ids, limits, wanted, None, shared)
        prompts = [self._prompt_call(body, request, shared, shown=frozenset() if format is None else self._tag_ids)]
        return self._call(body, prompts, limits, model, shared, includes_usage, format=format)

    def count_tokens(self, body: ChatBody, limits: RequestLimits) -> int:
        """Of the prompt that a chat makes."""
        check_fields(body)
        return len(self._chat_prompt(body, limits)[2])

    def _chat_prompt(self, body: ChatBody, limits: RequestLimits) -> tuple[ToolUse | None, str, list[int]]:
        """The tools that are offered with it, its text, and its tokens."""
        use = read_tools(body, self._tool_parser, self._special_texts, knows_tools=self._encoder.knows_tools)
        text = self._encoder.render(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=None if use is None else use.definitions,
            kwargs=body.chat_template_kwargs,
            reasoning_effort=body.reasoning_effort,
        )
        # The template writes the special tokens itself.
        special = bool(body.add_special_tokens)
        return use, text, self._encoder.encode(text, limits, add_special_tokens=special, field="messages")

    @property
    def splits_reasoning(self) -> bool:
        """Whether the operator has said how the model marks its reasoning."""
        return self._reasoning is not None

    def reasoning_tokens(self, call: Call) -> ReasoningTokens | None:
        """What counts them in the one choice of a chat; None if no text is reasoning."""
        format = call.chat_format
        if format is None or format.make_splitter is None:
            return None
        decoder = make_text_decoder(self._tokenizer, call.prompts[0].request.input_token_ids, shown=self._tag_ids)
        return ReasoningTokens(decoder, format.make_splitter())

    def completion(self, body: CompletionBody, limits: RequestLimits, model: str, adapter: LoRARequest | None) -> Call:
        check_fields(body)
        includes_usage = check_stream_options(body)
        output, scores_only = OutputConfig(), bool(body.echo) and body.max_tokens == 0
        if body.logprobs is not None:
            output = _output_config(body.logprobs, of_prompt=bool(body.echo))
        if body.stream and body.echo and body.logprobs is not None:
            raise invalid("echo together with logprobs is answered as a whole: leave out stream", "stream")
        add_special = body.add_special_tokens is not False
        texts, prompts = split_prompts(body.prompt), []
        shared = self._shared(body, limits, len(texts), output, read_guide(body), adapter)
        for prompt in texts:
            token_ids = self._encoder.encode(prompt, limits, add_special_tokens=add_special)
            wanted = 1 if scores_only else body.max_tokens
            request = self._request(body, token_ids, limits, wanted, COMPLETION_TOKENS, shared)
            is_whole = isinstance(prompt, str) and len(request.input_token_ids) == len(token_ids)
            prompts.append(self._prompt_call(body, request, shared, str(prompt) if is_whole else None))
        return self._call(body, prompts, limits, model, shared, includes_usage, scores_only=scores_only)

    def _chat_format(self, body: ChatBody, use: ToolUse | None, prompt: str) -> ChatFormat | None:
        """`prompt`: the text that the template has made."""
        style, hides = self._reasoning, body.include_reasoning is False
        if hides and style is None:
            raise unsupported("include_reasoning", "it needs the operator's setting reasoning_parser")
        if hides and (body.logprobs or body.return_token_ids):
            sentence = "include_reasoning false hides tokens that logprobs and return_token_ids show: leave those out"
            raise invalid(sentence, "include_reasoning")
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

    def _call(
        self,
        body: Body,
        prompts: list[PromptCall],
        limits: RequestLimits,
        model: str,
        shared: Shared,
        includes_usage: bool,
        *,
        scores_only: bool = False,
        format: ChatFormat | None = None,
    ) -> Call:
        wants_log_probs = (
            bool(body.logprobs) if isinstance(body, ChatBody) else getattr(body, "logprobs", None) is not None
        )
        as_ids, shows_special = bool(body.return_tokens_as_token_ids), body.skip_special_tokens is False
        return Call(
            is_chat=isinstance(body, ChatBody),
            model=model,
            prompts=prompts,
            num_choices=body.n or 1,
            param_names=shared.param_names,
            is_streamed=bool(body.stream),
            includes_usage=includes_usage,
            chat_format=format,
            log_probs=LogProbWriter(self._texts, as_ids=as_ids, shows_special=shows_special)
            if wants_log_probs
            else None,
            returns_token_ids=bool(body.return_token_ids),
            scores_only=scores_only,
            system_fingerprint=self._fingerprint(),
            not_enforced=not_enforced(shared.guide, limits),
            client_id=read_request_id(body.request_id),
        )

    def _shared(
        self,
        body: Body,
        limits: RequestLimits,
        num_prompts: int,
        output: OutputConfig,
        guide: Found | None,
        adapter: LoRARequest | None,
    ) -> Shared:
        check_backend(body, limits.guided_decoding_backend)
        stops, biases = read_stops(body), read_biases(body, limits.vocab_size)
        bad_words = self._tokenizer.encode_spellings(read_words(body.bad_words))
        num_bytes = ENTRY_BYTES * (len(bad_words) + len(biases.logit_bias)) + len(biases.embedding_bias)
        if num_prompts > 1 and num_prompts * num_bytes > MAX_COPIED_BYTES:
            most = max(MAX_COPIED_BYTES // num_bytes, 1)
            names = "bad_words, logit_bias and allowed_token_ids"
            raise invalid(f"with these {names} prompt may have {most} entries, got {num_prompts}", "prompt")
        return Shared(
            output=output,
            adapter=adapter,
            biases=biases,
            bad_words=bad_words,
            end_ids=self._end_ids(body, limits.vocab_size),
            guide=None if guide is None else guide[1],
            param_names=ParamNames(
                "messages" if isinstance(body, ChatBody) else "prompt", "" if guide is None else guide[0]
            ),
            stop_strings=StopStrings(stops) if stops else None,
        )

    def _prompt_call(
        self,
        body: Body,
        request: Request,
        shared: Shared,
        text: str | None = None,
        *,
        shown: frozenset[int] = frozenset(),
    ) -> PromptCall:
        """`text`: the prompt's, if it is known. `shown`: special tokens that have text whatever the body says."""
        stop_strings, min_tokens = shared.stop_strings, request.sampling_config.min_tokens
        keeps_stop = bool(body.include_stop_str_in_output)
        shows_special = body.skip_special_tokens is False
        stop_ids = frozenset(body.stop_token_ids or ())
        config = request.output_config

        def make_choice(index: int) -> Choice:
            decoder = make_text_decoder(
                self._tokenizer, request.input_token_ids, shows_special=shows_special, shown=shown
            )
            return Choice(
                index,
                Detokenizer(decoder, stop_strings, min_tokens, keeps_stop_string=keeps_stop),
                stop_ids=stop_ids,
                keeps_stop=keeps_stop,
                wants_log_probs=config.return_log_probs,
                keeps_ids=bool(body.return_token_ids),
            )

        echo = ""
        if isinstance(body, CompletionBody) and body.echo:
            echo = prompt_text(self._tokenizer, request.input_token_ids) if text is None else text
        return PromptCall(
            request=request, make_choice=make_choice, echo=echo, echoes_log_probs=config.return_prompt_log_probs
        )

    def _request(
        self,
        body: Body,
        token_ids: list[int],
        limits: RequestLimits,
        wanted: int | None,
        default: int | None,
        shared: Shared,
    ) -> Request:
        """`wanted`: new tokens that the body asks for; `default`: without that, None = as many as fit."""
        # The last token is sampled but never computed.
        context = min(limits.max_seq_len, limits.kv_cache_tokens + 1)
        token_ids = _truncated(body, token_ids, min(limits.max_input_len, context - max(wanted or 1, 1)))
        num_prompt, n = len(token_ids), body.n
        room = context - num_prompt
        if room < 1 or num_prompt > limits.max_input_len:
            raise context_too_long(context, num_prompt, shared.param_names.prompt)
        name = "max_tokens" if getattr(body, "max_completion_tokens", None) is None else "max_completion_tokens"
        if wanted is not None and wanted < 1:
            also = " (or 0 with echo)" if isinstance(body, CompletionBody) else ""
            raise invalid(f"{name} must be at least 1{also}, got {wanted}", name)
        if wanted is not None and wanted > room:
            raise context_too_long(context, num_prompt, name, wanted)
        most = min(limits.max_batch_size, MAX_CHOICES)
        if n is not None and not 1 <= n <= most:
            raise invalid(f"n must be between 1 and {most}, got {n}", "n")
        max_tokens = wanted or min(default or room, room)
        try:
            return self._valid_request(body, token_ids, limits, max_tokens, shared)
        except InvalidRequest as error:
            raise invalid(str(error), shared.param_names.of(str(error))) from None

    def _valid_request(
        self, body: Body, token_ids: list[int], limits: RequestLimits, max_tokens: int, shared: Shared
    ) -> Request:
        """Raises APIError, and InvalidRequest where the engine's own limits say no."""
        request = Request(
            input_token_ids=token_ids,
            max_tokens=max_tokens,
            # Stop strings are found in text: the engine must send every token at once so that it can be stopped.
            streaming=bool(body.stream or body.stop),
            sampling_config=sampling_config(body, self._defaults, shared.biases, len(token_ids), max_tokens),
            output_config=shared.output,
            end_ids=shared.end_ids,
            bad_words=shared.bad_words,
            guided_decoding_params=shared.guide,
            priority=engine_priority(body.priority),
            allotted_time_ms=self._allotted_ms(body.allotted_time_ms),
            cache_salt=read_salt(body.cache_salt),
            num_return_sequences=body.n or 1,
            lora_request=shared.adapter,
        )
        limits.validate(request)
        return with_grammar(request, limits)

    def _end_ids(self, body: Body, vocab_size: int) -> list[int]:
        named = body.stop_token_ids or []
        own = [] if body.ignore_eos else self._tokenizer.end_ids_below(vocab_size)
        if not all(0 <= token < vocab_size for token in named):
            raise invalid(f"stop_token_ids must hold token ids from 0 to {vocab_size - 1}", "stop_token_ids")
        return list(dict.fromkeys([*own, *named]))

    def _allotted_ms(self, asked: int | None) -> int:
        return min(filter(None, [asked, self._max_request_ms]), default=0)


def _output_config(count: int, *, of_prompt: bool = False) -> OutputConfig:
    return OutputConfig(return_log_probs=True, num_log_probs=count, return_prompt_log_probs=of_prompt)


def _truncated(body: Body, token_ids: list[int], most: int) -> list[int]:
    count = body.truncate_prompt_tokens
    if count is None:
        return token_ids
    if count < -1 or count == 0:
        raise invalid(f"truncate_prompt_tokens must be -1 or at least 1, got {count}", "truncate_prompt_tokens")
    kept = most if count == -1 else count
    return token_ids[-kept:] if kept > 0 else token_ids
