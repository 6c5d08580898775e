"""One model of a server: makes requests of what clients want of it.

All the work that grows with a request's text is done here, on a thread of the caller's. Every request that is made here
can be served.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from inflight.asking.ask import Ask, Illustrated, Prompt, TextPair
from inflight.asking.chat import Chat
from inflight.asking.images import Images, not_read
from inflight.asking.limit import Limit
from inflight.asking.prepared import Prepared, PreparedPrompt, engines_refusal
from inflight.asking.prompt_encoder import EncodedPair, PromptEncoder, shortened
from inflight.asking.refusal import Refusal, context_too_long, text_too_long
from inflight.asking.text_prompts import ChosenPrompt
from inflight.errors import InvalidRequest
from inflight.generation_defaults import GenerationDefaults
from inflight.guided_decoding import GuidedDecodingParams
from inflight.guides.requests import not_enforced, with_grammar
from inflight.prompt_tuning import PromptTuningConfig
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.sampling import Sampling
from inflight.sampling_config import SamplingConfig
from inflight.text.detokenizer import Detokenizer
from inflight.text.stop_strings import StopStrings
from inflight.text.text_decoder import make_text_decoder, prompt_text
from inflight.text.tokenizer import Tokenizer
from inflight.vision.families import TEXT_ALONE

if TYPE_CHECKING:  # tritonserver's stubs serve no chats, and need not load what chats need
    from inflight.asking.chats import Chats
    from inflight.asking.tool_use import ToolUse

MAX_COPIED_BYTES = 2**26
"""Of what all prompts of an `Ask` share and each brings to the engine."""
ENTRY_BYTES = 256
"""What a word or a bias counts of that, because of the time that each takes on its way: 2000 words take 20 ms."""


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """What all prompts of an `Ask` have in common, made once: a short body may have a thousand of them."""

    bad_words: list[list[int]]
    end_ids: list[int]
    stop_strings: StopStrings | None
    guide: GuidedDecodingParams | None = None
    guide_field: str = ""
    tuning: PromptTuningConfig | None = None
    """Of a chat with pictures."""


class Served:
    """Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        defaults: GenerationDefaults,
        encoder: PromptEncoder | None = None,
        chats: Chats | None = None,
        *,
        images: Images | None = None,
        max_request_seconds: float = 0.0,
    ) -> None:
        """`tokenizer`: None = prompts are token ids, and nobody reads answers. `encoder`: None = the length of texts
        has been checked. `chats`: None = nobody asks for any. `images`: of prompts that are no chats, None = they are
        text alone."""
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._encoder = PromptEncoder(tokenizer) if encoder is None else encoder
        self._chats = chats
        self._images = images
        self._max_request_ms = math.ceil(max_request_seconds * 1000)

    @property
    def chats(self) -> Chats:
        assert self._chats is not None
        return self._chats

    def num_left_out(self, prompt: ChosenPrompt) -> int:
        """Tokens of a text behind it that are no part of its vector."""
        return self._encoder.num_tokens_before(prompt.text) if prompt.text and not prompt.counts else 0

    def prepare(self, ask: Ask, limits: RequestLimits) -> Prepared:
        """Raises Refusal, and Unseen if pictures have to be seen first."""
        if isinstance(ask.prompt, Chat):
            return self._prepare_chat(ask, ask.prompt, limits)
        shared = self._with_guide(self._shared(ask, limits, len(ask.prompt)), ask)
        is_cut = bool(limits.pooled) and ask.limit.truncate_prompt_tokens is not None
        prompts = []
        for prompt in ask.prompt:
            start, own = 0, shared
            if isinstance(prompt, Illustrated):
                token_ids, tuning = self._illustrated(ask, prompt, limits)
                own = structs.replace(shared, tuning=tuning)
            elif isinstance(prompt, TextPair):
                pair = self._encoder.encode_pair(prompt, limits, is_cut=is_cut)
                token_ids, start = _cut_pair(pair, ask.limit, limits), pair.second_text_start
            else:
                token_ids = self._encoder.encode(
                    prompt, limits, add_special_tokens=ask.adds_special_tokens, is_cut=is_cut
                )
                if is_cut:
                    token_ids = _cut(token_ids, ask.limit, limits, self._encoder.num_behind(token_ids, limits))
            prompts.append(self._prompt(ask, token_ids, limits, own, prompt, second_text_start=start))
        return self._prepared(prompts, shared, limits)

    def _illustrated(
        self, ask: Ask, prompt: Illustrated, limits: RequestLimits
    ) -> tuple[list[int], PromptTuningConfig]:
        if self._images is None:
            raise not_read(TEXT_ALONE)
        if ask.further.get("prompt_tuning_config") is not None:
            raise Refusal("prompt", "{0} holds an image beside embeddings of its own: give one of them")
        pictures = self._images.seen(prompt.files, limits)
        text = self._images.written(prompt.text, pictures)
        token_ids = self._encoder.encode(text, limits, add_special_tokens=ask.adds_special_tokens)
        return self._images.with_rows(token_ids, pictures, limits)

    def _prepare_chat(self, ask: Ask, chat: Chat, limits: RequestLimits) -> Prepared:
        chats = self.chats
        use = chats.tools(chat, ask)
        text, token_ids, tuning = chats.encode_with_rows(chat, limits)
        format = chats.format(ask, use, text)
        shared = self._with_guide(self._shared(ask, limits, 1), ask, use)
        if tuning is not None:
            shared = structs.replace(shared, tuning=tuning)
        if format is None:
            return self._prepared([self._prompt(ask, token_ids, limits, shared)], shared, limits)
        if shared.guide is not None:
            guide = chats.with_tags(shared.guide, text, is_of_calls=shared.guide_field != "guide")
            shared = structs.replace(shared, guide=guide)
        prompt = self._prompt(ask, token_ids, limits, shared, shown=chats.tag_ids)
        return structs.replace(self._prepared([prompt], shared, limits), format=format)

    @staticmethod
    def _prepared(prompts: list[PreparedPrompt], shared: Shared, limits: RequestLimits) -> Prepared:
        left_out = not_enforced(shared.guide, limits)
        return Prepared(prompts=prompts, guide_field=shared.guide_field, not_enforced=left_out)

    def _needed(self) -> Tokenizer:
        assert self._tokenizer is not None, "who reads or writes text has a tokenizer"
        return self._tokenizer

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
        return structs.replace(shared, guide=guide, guide_field=field)

    def _shared(self, ask: Ask, limits: RequestLimits, num_prompts: int) -> Shared:
        sampling, stop = ask.sampling, ask.stop
        if stop.texts and (sampling.beam_width or 1) > 1:
            raise Refusal("stop", "{0} is not supported together with {1} above 1", "beam_width")
        words = [*ask.bad_word_ids]
        if ask.bad_words:
            words += self._needed().encode_spellings(ask.bad_words)
        bad_words = [list(word) for word in dict.fromkeys(map(tuple, words)) if word]
        num_entries = len(bad_words) + len(sampling.logit_bias or ())
        num_bytes = ENTRY_BYTES * num_entries + len(sampling.embedding_bias or b"")
        if num_prompts > 1 and num_prompts * num_bytes > MAX_COPIED_BYTES:
            raise Refusal(
                "prompt",
                "with these {1}, {2} and {3} {0} may have {most} entries, got {count}",
                *("bad_words", "logit_bias", "embedding_bias"),
                most=max(MAX_COPIED_BYTES // num_bytes, 1),
                count=num_prompts,
            )
        return Shared(
            bad_words=bad_words,
            end_ids=self._end_ids(ask, limits.vocab_size),
            stop_strings=StopStrings([*stop.texts]) if stop.texts else None,
        )

    def _end_ids(self, ask: Ask, vocab_size: int) -> list[int]:
        named = ask.stop.token_ids
        has_own = ask.stop.ends_by_itself and self._tokenizer is not None
        own = self._needed().end_ids_below(vocab_size) if has_own else []
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
        second_text_start: int = 0,
    ) -> PreparedPrompt:
        """`shown`: special tokens that have text whatever the client says. `second_text_start`: see Request."""
        request = self._request(ask, token_ids, limits, shared, second_text_start)
        text, ids = "", request.input_token_ids
        if ask.show.prompt:
            is_whole = isinstance(prompt, str) and len(ids) == len(token_ids)
            text = str(prompt) if is_whole else prompt_text(self._needed(), ids)
        make = partial(self._detokenizer, ask, request, shared.stop_strings, shown)
        return PreparedPrompt(request=request, make_detokenizer=make, text=text)

    def _detokenizer(
        self, ask: Ask, request: Request, stop_strings: StopStrings | None, shown: frozenset[int]
    ) -> Detokenizer:
        decoder = make_text_decoder(
            self._needed(), request.input_token_ids, shows_special=ask.show.special_tokens, shown=shown
        )
        min_tokens = request.sampling_config.min_tokens
        return Detokenizer(decoder, stop_strings, min_tokens, keeps_stop_string=ask.stop.is_kept)

    def _request(
        self, ask: Ask, token_ids: list[int], limits: RequestLimits, shared: Shared, second_text_start: int
    ) -> Request:
        token_ids, max_tokens = _fitted(ask.limit, token_ids, limits)
        try:
            request = Request(
                input_token_ids=token_ids,
                max_tokens=max_tokens,
                # Stop strings are found in text: the engine must send every token at once so that it can be stopped.
                streaming=ask.streaming or bool(ask.stop.texts),
                sampling_config=self._sampling_config(ask.sampling, len(token_ids), max_tokens),
                output_config=ask.show.output,
                end_ids=shared.end_ids,
                stop_words=[*ask.stop.sequences],
                bad_words=shared.bad_words,
                guided_decoding_params=shared.guide,
                priority=ask.priority,
                allotted_time_ms=min(filter(None, [ask.limit.allotted_time_ms, self._max_request_ms]), default=0),
                cache_salt=ask.cache_salt,
                num_return_sequences=ask.choices,
                lora_request=ask.adapter,
                second_text_start=second_text_start,
                **(ask.further if shared.tuning is None else {**ask.further, "prompt_tuning_config": shared.tuning}),
            )
            limits.validate(request)
            return with_grammar(request, limits)
        except InvalidRequest as error:
            raise engines_refusal(str(error), shared.guide_field) from None

    def _sampling_config(
        self, sampling: Sampling | SamplingConfig, num_prompt_tokens: int, max_tokens: int
    ) -> SamplingConfig:
        if isinstance(sampling, SamplingConfig):
            return sampling
        return self._defaults.sampling_config(sampling, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)


def _cut(token_ids: list[int], limit: Limit, limits: RequestLimits, num_behind: int) -> list[int]:
    """A text of an engine that generates nothing. Of one that is cut the first tokens are kept and those that end it,
    `num_behind`. Raises Refusal."""
    count = limit.truncate_prompt_tokens
    if count is None:
        return token_ids
    return shortened(token_ids, limits.max_input_len if count == -1 else _checked_count(count), num_behind)


def _cut_pair(pair: EncodedPair, limit: Limit, limits: RequestLimits) -> list[int]:
    """Raises Refusal if nothing is kept of the second text."""
    token_ids = _cut(pair.token_ids, limit, limits, pair.num_behind)
    if len(token_ids) < len(pair.token_ids) and len(token_ids) <= pair.num_before + pair.num_behind:
        raise Refusal("prompt", "the first text of {0} leaves no room for the second one")
    return token_ids


def _checked_count(count: int) -> int:
    """Of tokens that are kept. Raises Refusal."""
    if count < 1:
        raise Refusal("truncate_prompt_tokens", "{0} must be -1 or at least 1, got {count}", count=count)
    return count


def _fitted(limit: Limit, token_ids: list[int], limits: RequestLimits) -> tuple[list[int], int]:
    """The tokens of the prompt that are kept, and how many new ones there may be. Raises Refusal."""
    asked, count = limit.max_tokens, limit.truncate_prompt_tokens
    if limits.pooled:
        if len(token_ids) > limits.max_input_len:
            raise text_too_long(limits.max_input_len, len(token_ids))
        return token_ids, asked or 0
    if limit.may_exceed and asked is not None:
        return token_ids, asked
    # The last token is sampled but never computed.
    context = min(limits.max_seq_len, limits.kv_cache_tokens + 1)
    if count is not None:
        kept = min(limits.max_input_len, context - (asked or 1)) if count == -1 else _checked_count(count)
        token_ids = token_ids[-kept:] if kept > 0 else token_ids
    room = context - len(token_ids)
    if room < 1 or len(token_ids) > limits.max_input_len:
        raise context_too_long(context, len(token_ids))
    if asked is not None and asked > room:
        raise context_too_long(context, len(token_ids), "max_tokens", asked)
    return token_ids, asked or min(limit.default or room, room)
