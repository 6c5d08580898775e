"""How one model chats: its template, how it calls tools, and how it marks what it thinks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from msgspec import structs

from inflight.asking.ask import Ask
from inflight.asking.chat import Chat
from inflight.asking.chat_format import ChatFormat
from inflight.asking.chat_renderer import ChatRenderer
from inflight.asking.images import Images, files_in
from inflight.asking.prompt_encoder import PromptEncoder
from inflight.asking.reasoning import reasoning_style
from inflight.asking.reasoning_tokens import ReasoningTokens
from inflight.asking.refusal import Refusal, unsupported
from inflight.asking.tool_use import CheckText, ToolUse, read_tools
from inflight.asking.tools.parser import tool_tags
from inflight.guided_decoding import GuidedDecodingParams
from inflight.prompt_tuning import PromptTuningConfig
from inflight.request_limits import RequestLimits
from inflight.text.text_decoder import make_text_decoder
from inflight.text.tokenizer import Tokenizer
from inflight.vision.seen import Picture


class Chats:
    """Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        encoder: PromptEncoder,
        renderer: ChatRenderer,
        *,
        tool_parser: str = "",
        reasoning_parser: str = "",
        check_text: CheckText | None = None,
        images: Images | None = None,
    ) -> None:
        """`tool_parser`, `reasoning_parser`: families whose text the checkpoint writes, "" = none. `check_text`: of
        calls' arguments, None = nobody checks them. `images`: None = the model reads text alone. Raises
        ConfigurationError."""
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._renderer = renderer
        self._tool_parser = tool_parser
        self._reasoning = reasoning_style(reasoning_parser) if reasoning_parser else None
        self._check_text = check_text
        self._images = images or Images(None, tokenizer)
        self._special_texts = frozenset(filter(None, map(tokenizer.token, tokenizer.special_ids)))
        self.tag_ids = self._special_ids(
            tool_tags(tool_parser) if tool_parser else (), () if self._reasoning is None else self._reasoning.tags
        )
        """Special tokens that have text whatever the client says."""

    @property
    def reads_calls(self) -> bool:
        """Whether the model is told of tools, and its calls of them are read."""
        return bool(self._tool_parser) and self._renderer.knows_tools

    @property
    def splits_reasoning(self) -> bool:
        """Whether the operator has said how the model marks its reasoning."""
        return self._reasoning is not None

    @property
    def template(self) -> str:
        """The chat template's text, in Jinja; "" = there is none."""
        return self._renderer.source

    @property
    def knows_effort(self) -> bool:
        """See ChatRenderer."""
        return self._renderer.knows_effort

    def encode(self, chat: Chat, limits: RequestLimits) -> tuple[str, list[int]]:
        """The text that the chat template makes of it, and its tokens; those of a picture are placeholders. Raises
        Refusal, and Unseen if it has pictures that have to be seen first."""
        text, token_ids, _ = self._read(chat, limits)
        return text, token_ids

    def encode_with_rows(self, chat: Chat, limits: RequestLimits) -> tuple[str, list[int], PromptTuningConfig | None]:
        """The same with the rows of the pictures in the place of their placeholders, and these. Raises as it does."""
        text, token_ids, pictures = self._read(chat, limits)
        if not pictures:
            return text, token_ids, None
        return text, *self._images.with_rows(token_ids, pictures, limits)

    def _read(self, chat: Chat, limits: RequestLimits) -> tuple[str, list[int], list[Picture]]:
        files = files_in(chat.messages)
        pictures = self._images.seen(files, limits) if files else []
        text = self._renderer.render(chat)
        if pictures:
            text = self._images.written(text, pictures)
        return text, self._encoder.encode(text, limits, add_special_tokens=chat.adds_special_tokens), pictures

    def tools(self, chat: Chat, ask: Ask | None = None) -> ToolUse | None:
        """None without tools. `ask`: what the chat is part of. Raises Refusal."""
        answer = None if ask is None or ask.guide is None else ask.guide.form
        knows_tools = self._renderer.knows_tools
        return read_tools(chat, self._tool_parser, answer, self._special_texts, knows_tools=knows_tools)

    def reasoning_tokens(self, format: ChatFormat, prompt_ids: list[int]) -> ReasoningTokens | None:
        """What counts them in one choice; None if no text is reasoning."""
        if format.make_splitter is None:
            return None
        return ReasoningTokens(
            make_text_decoder(self._tokenizer, prompt_ids, shown=self.tag_ids), format.make_splitter()
        )

    def format(self, ask: Ask, use: ToolUse | None, prompt: str) -> ChatFormat | None:
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

    def with_tags(self, guide: GuidedDecodingParams, prompt: str, *, is_of_calls: bool) -> GuidedDecodingParams:
        """The grammar as that of the answer: the model may think before it, unless the prompt says that it has, and
        tags that are special tokens are text."""
        style = self._reasoning
        reasoning = None if style is None else style.thought(prompt, is_of_calls=is_of_calls)
        return structs.replace(guide, reasoning=reasoning, shown_token_ids=tuple(sorted(self.tag_ids)))

    def _special_ids(self, *tags: Iterable[str]) -> frozenset[int]:
        """The special tokens that are tags."""
        texts, tokenizer = set(chain(*tags)), self._tokenizer
        return frozenset(token for token in tokenizer.special_ids if tokenizer.token(token) in texts)
