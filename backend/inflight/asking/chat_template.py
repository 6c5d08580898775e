"""The checkpoint's chat template, run in jinja's sandbox as transformers' `apply_chat_template` does.

Without transformers, which takes seconds to import. A template is a program: it comes from the checkpoint's folder
alone, never from a request.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inflight.asking.refusal import Refusal
from inflight.asking.template_habits import (
    ARGUMENTS,
    ID,
    NAME,
    NAMING_ID,
    TOOL,
    Messages,
    find_habits,
    written_call,
)
from inflight.asking.tools.detection import families_reading
from inflight.errors import ConfigurationError
from inflight.text.safe_text import safe_text

FILE = "chat_template.jinja"
OF_PROCESSOR = "chat_template.json"
"""Of older checkpoints with images, whose tokenizer may have another template, for text alone."""
THINKING = "enable_thinking"
"""Variable of Qwen3's, GLM's and others' templates: whether the model thinks before it answers."""
DEFAULT, TOOL_USE = "default", "tool_use"
"""Of several templates in tokenizer_config.json: the usual one, and the one for chats with tools."""


class ChatTemplate:
    """Safe to use from several threads."""

    def __init__(self, source: str, special_tokens: dict[str, str], tool_use: str | None = None) -> None:
        """`special_tokens`: bos_token and others, which templates use as variables. `tool_use`: of chats with tools,
        None = `source`. Raises ConfigurationError."""
        self.source = source
        self._special_tokens = special_tokens
        self.knows_tools = "tools" in (source if tool_use is None else tool_use)
        """Whether it tells the model which tools there are."""
        self.knows_developer = "developer" in source
        """Whether it has a role of that name."""
        self.knows_effort = "reasoning_effort" in source
        """Whether it has a variable of that name."""
        self.knows_thinking = THINKING in source
        """Likewise."""
        try:
            self._template = _environment().from_string(source)
            self._tool_use = self._template if tool_use is None else _environment().from_string(tool_use)
        except jinja2.TemplateError as error:
            raise ConfigurationError(f"the checkpoint's chat template is no jinja template: {error}") from None
        self._habits = find_habits(self._render_probe)
        written = [written_call(self._render_probe, self._habits, call_id) for call_id in (ID, NAMING_ID)]
        self.tool_families = next(filter(None, (families_reading(text, NAME, ARGUMENTS) for text in written)), [])
        """Whose calls it writes into a conversation; [] if they are those of no family, or if it writes none."""

    def _render_probe(self, messages: Messages) -> str:
        return self._tool_use.render(
            **self._special_tokens, tools=[TOOL], documents=None, messages=messages, add_generation_prompt=False
        )

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """The template of the tokenizer in `folder`; None if it has none. Raises ConfigurationError."""
        config = read_json(folder / "tokenizer_config.json")
        sources = _sources(folder, config)
        if DEFAULT not in sources:
            return None
        own = {**read_json(folder / "special_tokens_map.json"), **config}
        tokens = {name: _content(value) for name, value in own.items() if name.endswith("_token")}
        known = {name: token for name, token in tokens.items() if token is not None}
        return cls(sources[DEFAULT], known, sources.get(TOOL_USE))

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation. `continue_final_message`: without what ends the last message, so that the answer
        continues it. `tools`: in OpenAI's form. Raises Refusal for what the template refuses."""
        variables = {**self._special_tokens, "tools": tools, "documents": None, **kwargs}
        template = self._tool_use if tools else self._template
        try:
            text = template.render(
                **variables, messages=self._habits.adapted(messages), add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # of the template's own code, about these messages
            sentence = "the chat template does not take these messages: {said}"
            raise Refusal("prompt", sentence, said=safe_text(str(error))) from None
        return _without_end(text, messages[-1]["content"]) if continue_final_message else text


def _without_end(text: str, content: str | list[dict[str, Any]]) -> str:
    final = content if isinstance(content, str) else str(content[-1].get("text", ""))
    final = final.strip()
    place = text.rfind(final)
    if not final or place < 0:
        raise Refusal("prompt", "the chat template does not write the last message as it is: it cannot be continued")
    return text[: place + len(final)]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """With transformers' parameters, in their order. Unlike jinja's own it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Generation(jinja2.ext.Extension):
    """{% generation %}, by which training finds the assistant's tokens: its content is all that matters here."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name."""
    path = folder / FILE
    if path.is_file():
        try:
            return {DEFAULT: path.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from None
    given = read_json(folder / OF_PROCESSOR).get("chat_template") or config.get("chat_template")
    if isinstance(given, list):
        named = {each["name"]: each["template"] for each in given if isinstance(each, dict)}
    else:
        named = {DEFAULT: given}
    return {name: source for name, source in named.items() if isinstance(source, str)}


def _content(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """An object of a checkpoint's file; {} if there is none. Raises ConfigurationError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ConfigurationError(f"{path} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    return value if isinstance(value, dict) else {}
