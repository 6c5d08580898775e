"""The syntaxes that are known, by vLLM's names of their parsers.

Sources: the chat templates of the checkpoints, vLLM's and SGLang's parsers of the same names, and XGrammar's structural
tags of the models. Families that write the same have one row, and their names are aliases.
"""

from __future__ import annotations

from inflight.asking.tools.channels import BEFORE_NAME, BEHIND_NAME, CALL, START
from inflight.asking.tools.syntax import (
    BareArguments,
    CallForm,
    CallSyntax,
    JsonArguments,
    NamedCall,
    ObjectCall,
    PythonArguments,
    TaggedArguments,
)

_OBJECTS = CallForm(call=ObjectCall(), in_list=True, between=", ")
_PYTHON = NamedCall(arguments=PythonArguments())


def _one(call: NamedCall | ObjectCall, between: str | None = None) -> tuple[CallForm, ...]:
    return (CallForm(call=call, between=between),)


def _dsml(section: str) -> CallSyntax:
    return CallSyntax(
        begin=f"<｜DSML｜{section}>\n",
        forms=_one(
            NamedCall(
                before_name='<｜DSML｜invoke name="',
                behind_name='">\n',
                arguments=TaggedArguments(
                    before_key='<｜DSML｜parameter name="',
                    behind_key='" string="true">',
                    behind_json_key='" string="false">',
                    behind_value="</｜DSML｜parameter>\n",
                ),
                behind_arguments="</｜DSML｜invoke>",
            ),
            "\n",
        ),
        end=f"\n</｜DSML｜{section}>",
    )


FAMILIES: dict[str, CallSyntax] = {
    "hermes": CallSyntax(begin="<tool_call>\n", forms=_one(ObjectCall()), end="\n</tool_call>", joint="\n"),
    "qwen3_coder": CallSyntax(
        begin="<tool_call>\n",
        forms=_one(
            NamedCall(
                before_name="<function=",
                behind_name=">\n",
                arguments=TaggedArguments(
                    before_key="<parameter=", behind_key=">", behind_value="</parameter>\n", pad="\n"
                ),
                behind_arguments="</function>",
            )
        ),
        end="\n</tool_call>",
        joint="\n",
        within_text=("<function=",),  # its models leave the tag out at times
    ),
    "llama3_json": CallSyntax(
        begin="<|python_tag|>",
        forms=_one(ObjectCall(key="parameters"), "; "),
        is_bare=True,
        within_text=('{"name": "',),
    ),
    "pythonic": CallSyntax(
        begin="<|python_start|>",
        forms=(CallForm(call=_PYTHON, in_list=True, between=", "),),
        end="<|python_end|>",
        is_bare=True,
    ),
    "mistral": CallSyntax(
        begin="[TOOL_CALLS]",
        forms=(
            CallForm(
                call=NamedCall(
                    behind_name="[ARGS]",
                    may_omit_behind_name=True,
                    before_id="[CALL_ID]",
                    id_pattern="[a-zA-Z0-9]{9}",
                    id_token="[CALL_ID]",
                    arguments=JsonArguments(),
                ),
                needs="[ARGS]",
            ),
            _OBJECTS,
        ),
        joint="",
    ),
    "deepseek_v3": CallSyntax(
        begin="<｜tool▁calls▁begin｜>",
        forms=_one(
            NamedCall(
                before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                behind_name="\n```json\n",
                arguments=JsonArguments(),
                behind_arguments="\n```<｜tool▁call▁end｜>",
            ),
            "\n",
        ),
        end="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": CallSyntax(
        begin="<｜tool▁calls▁begin｜>",
        forms=_one(
            NamedCall(
                before_name="<｜tool▁call▁begin｜>",
                behind_name="<｜tool▁sep｜>",
                arguments=JsonArguments(),
                behind_arguments="<｜tool▁call▁end｜>",
            ),
            "",
        ),
        end="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "kimi_k2": CallSyntax(
        begin="<|tool_calls_section_begin|>",
        forms=_one(
            NamedCall(
                before_name="<|tool_call_begin|>functions.",
                before_id=":",
                id_pattern="[0-9]{1,4}",
                kept_id="functions.{name}:{id}",
                behind_name="<|tool_call_argument_begin|>",
                arguments=JsonArguments(),
                behind_arguments="<|tool_call_end|>",
            ),
            "",
        ),
        end="<|tool_calls_section_end|>",
    ),
    "glm45": CallSyntax(
        begin="<tool_call>",
        forms=_one(
            NamedCall(
                behind_name="\n",
                arguments=TaggedArguments(
                    before_key="<arg_key>",
                    behind_key="</arg_key>\n<arg_value>",
                    behind_value="</arg_value>\n",
                ),
                behind_arguments="</tool_call>",
            )
        ),
        joint="\n",
    ),
    "glm47": CallSyntax(
        begin="<tool_call>",
        forms=_one(
            NamedCall(
                arguments=TaggedArguments(
                    before_key="<arg_key>",
                    behind_key="</arg_key><arg_value>",
                    behind_value="</arg_value>",
                ),
                behind_arguments="</tool_call>",
            )
        ),
        joint="",
    ),
    "minimax_m2": CallSyntax(
        begin="<minimax:tool_call>\n",
        forms=_one(
            NamedCall(
                before_name='<invoke name="',
                behind_name='">\n',
                arguments=TaggedArguments(
                    before_key='<parameter name="', behind_key='">', behind_value="</parameter>\n"
                ),
                behind_arguments="</invoke>",
            ),
            "\n",
        ),
        end="\n</minimax:tool_call>",
    ),
    "granite": CallSyntax(begin="<|tool_call|>", also_begins=("<tool_call>",), forms=(_OBJECTS,)),
    "functiongemma": CallSyntax(
        begin="<start_function_call>",
        forms=_one(NamedCall(before_name="call:", arguments=BareArguments(quote="<escape>"))),
        end="<end_function_call>",
        joint="",
    ),
    "gemma4": CallSyntax(
        begin="<|tool_call>",
        forms=_one(NamedCall(before_name="call:", arguments=BareArguments(quote='<|"|>'))),
        end="<tool_call|>",
        joint="",
    ),
    "phi4_mini_json": CallSyntax(begin="functools[", forms=(_OBJECTS,)),
    "lfm2": CallSyntax(
        begin="<|tool_call_start|>",
        forms=(CallForm(call=_PYTHON, in_list=True, between=", "),),
        end="<|tool_call_end|>",
    ),
    "olmo3": CallSyntax(begin="<function_calls>", forms=_one(_PYTHON, "\n"), end="</function_calls>"),
    "nemotron": CallSyntax(begin="<TOOLCALL>", forms=(_OBJECTS,), end="</TOOLCALL>"),
    "xlam": CallSyntax(forms=(_OBJECTS,), is_bare=True),
    "hunyuan_a13b": CallSyntax(begin="<tool_calls>", forms=(_OBJECTS,), end="</tool_calls>"),
    "seed_oss": CallSyntax(
        begin="<seed:tool_call>\n",
        forms=_one(
            NamedCall(
                before_name="<function=",
                behind_name=">\n",
                arguments=TaggedArguments(before_key="<parameter=", behind_key=">", behind_value="</parameter>\n"),
                behind_arguments="</function>",
            )
        ),
        end="\n</seed:tool_call>",
        joint="\n",
    ),
    "step3": CallSyntax(
        begin="<｜tool_calls_begin｜>\n",
        forms=_one(
            NamedCall(
                before_name='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
                behind_name='">',
                arguments=TaggedArguments(
                    before_key='<steptml:parameter name="', behind_key='">', behind_value="</steptml:parameter>"
                ),
                behind_arguments="</steptml:invoke><｜tool_call_end｜>",
            ),
            "\n",
        ),
        end="\n<｜tool_calls_end｜>",
    ),
    "internlm": CallSyntax(
        begin="<|action_start|><|plugin|>\n", forms=_one(ObjectCall(key="parameters")), end="<|action_end|>"
    ),
    "longcat": CallSyntax(
        begin="<longcat_tool_call>\n", forms=_one(ObjectCall()), end="\n</longcat_tool_call>", joint="\n"
    ),
    "harmony": CallSyntax(
        begin=BEFORE_NAME,
        also_begins=(START + BEFORE_NAME,),
        forms=_one(NamedCall(behind_name=BEHIND_NAME, arguments=JsonArguments(), behind_arguments=CALL)),
        joint=START,
        in_messages=True,
    ),
}
ALIASES = {
    "ernie45": "hermes",
    "granite4": "hermes",
    "qwen3_xml": "qwen3_coder",
    "mimo": "qwen3_coder",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "nemotron_json": "nemotron",
    "openai": "harmony",
}
"""Other names of the same syntaxes."""
FORCED = "json"
"""The parser of text that follows the grammar of a forced call, whatever the model's family."""
FORCED_SYNTAX = CallSyntax(
    forms=(CallForm(call=ObjectCall(key="parameters"), in_list=True, between=", "),), is_bare=True
)
NAMES = (*FAMILIES, *ALIASES)
MODEL_TYPES = {"gpt_oss": "harmony"}
"""Families by what config.json says of the checkpoint, for one whose chat template does not show it."""


def syntax_of(name: str) -> CallSyntax:
    """Of a family, also by another name of it. Raises KeyError."""
    return FORCED_SYNTAX if name == FORCED else FAMILIES[ALIASES.get(name, name)]
