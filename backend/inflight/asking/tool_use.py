"""What a chat says of tools: which are offered, whether some must be called, and who finds the calls."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Container
from dataclasses import dataclass

from inflight.asking.chat import Chat
from inflight.asking.chat_format import ChatFormat
from inflight.asking.refusal import Kind, Refusal, about
from inflight.asking.tool_choice import MODES
from inflight.asking.tools.chosen_guide import chosen_call_guide
from inflight.asking.tools.families import ALIASES, FORCED, MODEL_TYPES, syntax_of
from inflight.asking.tools.forms import Form
from inflight.asking.tools.guide import forced_call_guide
from inflight.asking.tools.message_guide import forced_message_guide
from inflight.asking.tools.parser import make_tool_parser, new_id_maker
from inflight.asking.tools.tool import Tool, validate_tools
from inflight.errors import ConfigurationError, InvalidRequest
from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.text.safe_text import safe_text

CheckText = Callable[[str, GuidedDecodingParams, str], None]
"""Takes what it is, for the log, its guide, and itself."""
MESSAGES = "harmony"
"""The reasoning parser of outputs that are messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Of one call."""

    tools: list[Tool]
    parser: str = ""
    """What finds calls in the output; "" = all of it is content."""
    family: str = ""
    """Whose chat template reads the calls' ids; "" = unknown."""
    guide: GuidedDecodingParams | None = None
    """The grammar of calls that must be made; or of those that may be, and of an answer in their place. None = calls
    are written without one."""
    is_forced: bool = False
    """Whether there must be a call."""
    has_answer_form: bool = False
    """Whether the grammar is also that of an answer, of which calls are no part."""
    is_named: bool = False
    keeps_one_call: bool = False

    def format(self, check_text: CheckText | None = None) -> ChatFormat:
        """How choices are read, as far as tools go. `check_text`: holds the arguments of calls against the schemas that
        a grammar has held them to."""
        if not self.parser:
            return ChatFormat()
        return ChatFormat(
            make_tool_parser=functools.partial(
                make_tool_parser,
                self.parser,
                self.tools,
                new_id_maker(self.family),
                at_start_only=self.has_answer_form,
                is_forced=self.is_forced,
            ),
            calls_are_all=self.is_forced,
            keeps_one_call=self.keeps_one_call,
            calls_are_a_reason=not self.is_named,
            check_call=None if check_text is None or self.guide is None else self._check_of_calls(check_text),
        )

    def _check_of_calls(self, check_text: CheckText) -> Callable[[str, str], None]:
        """Calls of a tool that is not strict may leave out what cannot be enforced: they are checked to be JSON."""
        schemas = {
            tool.name: GuidedDecodingParams(
                guide_type=GuideType.JSON_SCHEMA, guide=json.dumps(tool.schema), is_strict=bool(tool.strict)
            )
            for tool in self.tools
            if tool.strict or self.is_forced
        }

        def check(name: str, arguments: str) -> None:
            if name in schemas:
                check_text(f"a call of the tool {name}", schemas[name], arguments)

        return check


def choose_tool_parser(asked: str, families: list[str], *, knows_tools: bool, model_type: str = "") -> tuple[str, str]:
    """The family whose calls are read, "" = none, and what the operator is told of it. `asked`: by the operator.
    `families`: those whose calls the chat template writes. `model_type`: of the checkpoint."""
    setting = "--openai-set tool_parser"
    if asked:
        differs = f"the chat template writes calls of tools as {' and '.join(families)}, but {setting} is {asked}"
        return asked, differs if families and ALIASES.get(asked, asked) not in families else ""
    if len(families) == 1:
        known = f"calls of tools are read as {families[0]}, as the chat template writes them"
        return families[0], f"{known}; {setting}=… names another family"
    if not families and model_type in MODEL_TYPES:
        family = MODEL_TYPES[model_type]
        return (
            family,
            f"calls of tools are read as {family}, as {model_type} writes them; {setting}=… names another family",
        )
    if not knows_tools:
        return "", ""
    writes = f"as each of {', '.join(families)}" if families else "as no family that is known here"
    return "", f"tool_choice auto is refused: the chat template writes calls of tools {writes}; {setting}=… names one"


def choose_reasoning_parser(asked: str, tool_parser: str) -> str:
    """The family by which reasoning is found, "" = none. Where all output is messages, calls and reasoning are found by
    the same headers. `asked`: by the operator. Raises ConfigurationError if it does not go with the tools' parser."""
    in_messages = bool(tool_parser) and syntax_of(tool_parser).in_messages
    if asked and in_messages is not (asked == MESSAGES):
        needs = f"goes with tool_parser {MESSAGES} alone" if asked == MESSAGES else f"does not go with {tool_parser}"
        raise ConfigurationError(f"reasoning_parser {asked} {needs}")
    return asked or (MESSAGES if in_messages else "")


def read_tools(
    chat: Chat,
    family: str,
    answer: Form | None = None,
    special_tokens: Container[str] = (),
    *,
    knows_tools: bool = True,
) -> ToolUse | None:
    """None without tools. `family`: whose calls the model writes, "" = unknown. `answer`: the form of an answer, None =
    it is free. `special_tokens`: of the checkpoint. `knows_tools`: whether its chat template tells the model of tools.
    Raises Refusal."""
    choice, tools = chat.tool_choice, chat.tools
    if choice.mode not in ("", *MODES):
        raise Refusal("tool_choice", "{0} must be one of {modes}, or name functions", modes=", ".join(MODES))
    if tools is None:
        if choice.mode not in ("", "none"):
            raise Refusal("tool_choice", "{0} is only allowed when {1} are specified", "tools")
        return None
    if not tools:
        raise Refusal("tools", "{0} is empty: give at least one, or leave it out")
    check_tools(tools)
    offered = tools if choice.name is None else [tool for tool in tools if tool.name == choice.name]
    if choice.allowed is not None:
        offered = _allowed(choice.allowed, tools)
    use = functools.partial(ToolUse, tools=offered, family=family)
    if choice.mode == "none":
        return use()
    if choice.mode in ("", "auto"):
        _check_may_choose(family, knows_tools=knows_tools)
        guide = None
        if answer is not None or len(offered) < len(tools) or any(tool.strict for tool in offered):
            try:
                guide = chosen_call_guide(
                    family,
                    offered,
                    special_tokens=special_tokens,
                    parallel_tool_calls=choice.is_parallel,
                    answer=answer,
                )
            except InvalidRequest as error:
                raise about("tools", error) from None
        one = not choice.is_parallel
        return use(parser=family, guide=guide, has_answer_form=answer is not None, keeps_one_call=one)
    in_messages = bool(family) and syntax_of(family).in_messages
    force = forced_message_guide if in_messages else forced_call_guide
    try:
        guide = force(offered, name=choice.name, parallel_tool_calls=choice.is_parallel)
    except InvalidRequest as error:
        raise about("tool_choice", error) from None
    parser = family if in_messages else FORCED
    return use(parser=parser, guide=guide, is_forced=True, is_named=choice.name is not None)


def check_tools(tools: list[Tool]) -> None:
    """Raises Refusal."""
    try:
        validate_tools(tools)
    except InvalidRequest as error:
        raise about("tools", error) from None


def _allowed(names: list[str], tools: list[Tool]) -> list[Tool]:
    if not names:
        raise Refusal("tool_choice", "{1} is empty: give at least one", "tool_choice.allowed")
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            sentence = "{0} allows the tool {name}, which is not in {1}"
            raise Refusal("tool_choice", sentence, "tools", name=safe_text(name))
    return [tool for tool in tools if tool.name in names]


def _check_may_choose(family: str, *, knows_tools: bool) -> None:
    """Whether a model that may choose would call, and its calls would be found."""
    if not knows_tools:
        sentence = "the checkpoint's chat template tells the model of no tools: use {1} required"
        raise Refusal("tools", sentence, "tool_choice")
    if not family:
        sentence = (
            "{0} auto needs the operator's setting tool_parser, which says how this model writes calls; required and a "
            "named function work without it"
        )
        raise Refusal("tool_choice", sentence, kind=Kind.UNSUPPORTED)
