"""A parser finds the calls of tools in one choice's text. `make_tool_parser` makes the one of a family."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from typing import Protocol

from inflight.asking.tools.call_machine import CallMachine, ForcedMachine
from inflight.asking.tools.events import Event
from inflight.asking.tools.families import FORCED, NAMES, syntax_of
from inflight.asking.tools.tool import Tool
from inflight.errors import ConfigurationError


class ToolParser(Protocol):
    """The events do not depend on how the text is cut into pieces, but for where pieces of the same kind are joined.

    No text makes it raise. What is no call of an offered tool is content. Arguments are sent while they are written. If
    they break off, because the text ends or goes on with what fits no value, the call keeps what it has, and the rest
    is content. Nothing completes such arguments to valid JSON: a part of a command could be another command.
    """

    def feed(self, text: str) -> list[Event]:
        """The text's next piece. Returns what is certain by now."""

    def finish(self) -> list[Event]:
        """No more text comes; to be called once."""

    @property
    def breaks_off(self) -> bool:
        """Whether the text, as far as it came, ends within the arguments of a call."""


def make_tool_parser(
    name: str,
    tools: list[Tool],
    new_id: Callable[[], str] | None = None,
    *,
    at_start_only: bool = False,
    is_forced: bool = False,
) -> ToolParser:
    """A parser for one choice. `new_id` makes the calls' ids. `at_start_only`: see CallMachine. `is_forced`: whether
    the text follows a grammar that leaves nothing but calls. Raises ConfigurationError if there is no such parser."""
    if name != FORCED and name not in NAMES:
        raise ConfigurationError(f"there is no tool parser {name}: choose one of {', '.join(NAMES)}")
    make = ForcedMachine if is_forced else CallMachine
    return make(syntax_of(name), tools, new_id or new_id_maker(name), at_start_only=at_start_only)


def new_id_maker(family: str) -> Callable[[], str]:
    """What makes ids of calls as the chat templates of a family take them, "" = of any."""
    return _mistral_id if family == "mistral" else _call_id


def tool_tags(name: str) -> frozenset[str]:
    """The tags that a parser looks for: where they are special tokens, the text has to be made with them."""
    return syntax_of(name).tags()


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    """Its chat template takes no others."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
