"""The grammar of tool_choice auto with strict tools: text is free until a call begins, which its tool's schema rules.

Calls are written as the description of a family's syntax has them, and of what its parser takes for the beginning of a
call nothing else follows the grammar: what is found in the text always follows the schema of its tool. Instead of free
text there may be an answer in a form of its own, that of response_format.
"""

from __future__ import annotations

import re
from collections.abc import Container

from inflight.asking.tools.arguments_guide import arguments_form, json_arguments
from inflight.asking.tools.families import syntax_of
from inflight.asking.tools.forms import Form, any_text, either, optional, regex, separated, sequence, several, tag, text
from inflight.asking.tools.guide import guide_of, json_call, json_object_call
from inflight.asking.tools.message_guide import chosen_message_guide
from inflight.asking.tools.syntax import CallForm, CallSyntax, NamedCall
from inflight.asking.tools.tool import Tool
from inflight.guided_decoding import GuidedDecodingParams

SPACE = regex(r"[ \t\n\r]{0,8}")


def chosen_call_guide(
    family: str,
    tools: list[Tool],
    *,
    special_tokens: Container[str] = (),
    parallel_tool_calls: bool = True,
    answer: Form | None = None,
) -> GuidedDecodingParams:
    """`special_tokens`: of the checkpoint, by which it is known which of several forms its models write.
    `answer`: what the text without calls follows, None = it is free. Raises InvalidRequest if the grammar is beyond the
    engine's bounds, or if the family cannot write such arguments."""
    syntax = syntax_of(family)
    if syntax.in_messages:
        return chosen_message_guide(tools, parallel_tool_calls=parallel_tool_calls, answer=answer)
    guide = _CallGuide(syntax, tools, special_tokens, is_one=not parallel_tool_calls)
    if answer is None:
        return guide_of(guide.free(), "a strict tool")
    return guide_of(guide.instead_of(answer), "response_format together with tools")


class _CallGuide:
    def __init__(self, syntax: CallSyntax, tools: list[Tool], special_tokens: Container[str], *, is_one: bool) -> None:
        self._syntax = syntax
        self._form: CallForm = syntax.form(special_tokens)
        self._special_tokens = special_tokens
        self._is_one = is_one
        self._tools = tools
        self._calls = [self._call(tool) for tool in tools]
        """Of each tool, a tag."""

    def free(self) -> Form:
        """Calls, or free text with calls in it."""
        syntax = self._syntax
        begin = syntax.begin.strip()
        rules = [[tag_, self._behind(syntax.begin[len(begin) :])] for tag_ in syntax.begins]
        rules += [[start, self._behind_start(start)] for start in syntax.within_text]
        goes_on = syntax.joint is not None and not self._is_one
        dispatch: Form = {"type": "dispatch", "rules": rules, "loop": goes_on}
        if not syntax.is_bare:
            return dispatch
        # The first character decides whether the text is calls. The tag may begin it, too.
        opening = re.escape("[" if self._form.in_list else "{")
        other = rf"[^ \t\n\r{opening}]"
        if begin:
            first, second = re.escape(begin[0]), re.escape(begin[1])
            other = rf"[^ \t\n\r{opening}{first}]|{first}[^{first}{second}]"
        free = sequence(regex(other), dispatch if rules else any_text())
        return sequence(SPACE, optional(either(self._whole(), free)))

    def instead_of(self, answer: Form) -> Form:
        """Calls alone, or the answer."""
        call = self._form.call
        if self._syntax.is_bare and not self._form.in_list and not isinstance(call, NamedCall):
            # Both begin with a bracket: as schemas in one place they are told apart.
            self._calls = [tag("", json_object_call(tool, call.key)) for tool in self._tools]
        syntax, whole = self._syntax, self._whole()
        if syntax.joint is not None and not self._is_one:
            whole = several(whole, syntax.joint)
        return sequence(SPACE, either(answer, whole))

    def _whole(self) -> Form:
        """A text that is calls alone."""
        syntax = self._syntax
        if not syntax.is_bare:
            return sequence(text(syntax.begin), self._behind(""))
        begin = [optional(text(syntax.begin))] if syntax.begin else []
        end = [optional(text(syntax.end))] if syntax.end else []
        return sequence(*begin, self._several(), *end)

    def _behind(self, begin: str) -> Form:
        """What follows the tag that begins calls. `begin`: the white space of the beginning."""
        before = [text(begin)] if begin else []
        # Templates of Mistral have a space before the list.
        before += [regex(" ?")] if self._form.in_list and not self._syntax.begin.endswith("[") else []
        end = [text(self._syntax.end)] if self._syntax.end else []
        return sequence(*before, self._several(), *end)

    def _behind_start(self, start: str) -> Form:
        """What follows the beginning of a call without a tag."""
        calls = [{**call, "begin": call["begin"][len(start) :]} for call in self._calls]
        if self._form.between is None or self._is_one:
            return either(*calls)
        further = sequence(text(self._form.between), either(*self._calls))
        return sequence(either(*calls), {"type": "star", "content": further})

    def _several(self) -> Form:
        """The calls that follow one tag."""
        form = self._form
        is_one = self._is_one or form.between is None
        calls = either(*self._calls) if is_one else separated(self._calls, form.between or "", is_one=False)
        if form.in_list:
            bracket = [] if self._syntax.begin.endswith("[") else [text("[")]
            return sequence(*bracket, calls, text("]"))
        return calls

    def _call(self, tool: Tool) -> Form:
        call = self._form.call
        if not isinstance(call, NamedCall):
            return json_call(tool, call.key, json_arguments(tool))
        arguments = arguments_form(call.arguments, tool)
        behind = call.behind_name
        if call.before_id and (not call.id_token or call.id_token in self._special_tokens):
            own_id = sequence(text(call.before_id), regex(call.id_pattern))
            has_one = own_id if not call.id_token else optional(own_id)
            arguments, behind = sequence(has_one, *([text(behind)] if behind else []), arguments), ""
        end = call.behind_arguments
        if not end and arguments["type"] == "sequence" and arguments["elements"][-1]["type"] == "const_string":
            # What may hold free text needs an end: the bracket that closes the arguments.
            *parts, last = arguments["elements"]
            arguments, end = sequence(*parts), last["value"]
        return tag(call.before_name + tool.name + behind, arguments, end)
