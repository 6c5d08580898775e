"""Tools that no call could be made of are refused with one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.asking.tools.tool import MAX_TOOLS, Tool, validate_tools
from inflight.errors import InvalidRequest


@pytest.mark.parametrize("name", ["", "a b", "a.b", "é", 'a"b', "a\n", "x" * 65])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="the name of a tool has 1 to 64 letters"):
        Tool(name=name).validate()


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"type": "string"}, "the parameters of tool f must be a JSON schema of type object"),
        ({"type": ["object"]}, "the parameters of tool f must be a JSON schema of type object"),
        ({"properties": []}, "the properties of tool f must each be a JSON schema"),
        ({"properties": {"a": "string"}}, "the properties of tool f must each be a JSON schema"),
        ({"required": "a"}, "the required parameters of tool f must be a list of names"),
        ({"required": [1]}, "the required parameters of tool f must be a list of names"),
    ],
)
def test_parameters_that_are_no_schema_are_refused(parameters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        Tool(name="f", parameters=parameters).validate()


@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"type": "object"}, {"properties": {"a": {"type": "string"}, "b": True}, "required": ["a"]}],
)
def test_parameters_may_be_left_out(parameters: dict[str, Any] | None) -> None:
    tool = Tool(name="get_weather-2", parameters=parameters)
    tool.validate()
    assert tool.schema["type"] == "object"


def test_names_are_unique_and_tools_are_few() -> None:
    validate_tools([Tool(name=f"f{index}") for index in range(MAX_TOOLS)])
    with pytest.raises(InvalidRequest, match="two tools with the name f"):
        validate_tools([Tool(name="f"), Tool(name="f")])
    with pytest.raises(InvalidRequest, match="129 tools, more than 128"):
        validate_tools([Tool(name=f"f{index}") for index in range(MAX_TOOLS + 1)])
