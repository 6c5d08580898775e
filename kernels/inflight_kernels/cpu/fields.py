"""The fields of structures that Python and C++ share, declared once for both.

Knows no structure: operations.py and instructions.py have them, and operation_header.py writes them as C++.
"""

from __future__ import annotations

import ctypes
import inspect
import re
from collections.abc import Iterator
from typing import Any

Declaration = tuple[str | type[ctypes.Structure], str] | tuple[str | type[ctypes.Structure], str, str]
"""The type of fields, in C++'s words or a structure of this kind; their names; a comment, shapes and units first."""

_NUMBERS: dict[str, Any] = {"int64_t": ctypes.c_int64, "float": ctypes.c_float}
_ENUMS = frozenset(
    {
        "Activation",
        "CacheFormat",
        "Gate",
        "GroupScore",
        "Ids",
        "InputFormat",
        "Instruction",
        "Kind",
        "Place",
        "Scores",
        "SharedFormat",
        "WeightFormat",
    }
)
"""Each of them an int64_t."""


class Fields(tuple[tuple[str, Any], ...]):
    """A structure's `_fields_`, which remember how they were declared."""

    declarations: tuple[Declaration, ...]

    def __new__(cls, *declarations: Declaration) -> Fields:
        made = super().__new__(
            cls, ((name, _c_type(kind)) for kind, names, *_ in declarations for name in names.split())
        )
        made.declarations = declarations
        return made


def declarations_of(structure: type[ctypes.Structure]) -> list[Declaration]:
    """Those of its bases first, as they lie in memory."""
    return [
        declaration
        for each in reversed(inspect.getmro(structure))
        if isinstance(fields := vars(each).get("_fields_"), Fields)
        for declaration in fields.declarations
    ]


def name_in_cpp(structure: type[ctypes.Structure]) -> str:
    return structure.__name__.removeprefix("Native")


def layout_of(structure: type[ctypes.Structure]) -> Iterator[tuple[str, int]]:
    """C++'s expressions for its size and its fields' offsets in bytes, and what Python has for them."""
    yield f"sizeof({name_in_cpp(structure)})", ctypes.sizeof(structure)
    for _, names, *_ in declarations_of(structure):
        for name in names.split():
            yield f"offsetof({name_in_cpp(structure)}, {name})", getattr(structure, name).offset


def _c_type(kind: str | type[ctypes.Structure]) -> Any:
    if not isinstance(kind, str):
        return kind
    if kind.endswith("*"):
        return ctypes.c_void_p
    if kind in _ENUMS:
        return ctypes.c_int64
    if array := re.fullmatch(r"(\w+)\[(\d+)\]", kind):
        return _NUMBERS[array[1]] * int(array[2])
    return _NUMBERS[kind]
