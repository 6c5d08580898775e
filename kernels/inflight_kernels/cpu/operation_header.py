"""Writes native/operation_fields.h: the structures of operations.py as C++. Run it after a change there:

python -m inflight_kernels.cpu.operation_header
"""

from __future__ import annotations

import ctypes
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from inflight_kernels.activation.kinds import Activation
from inflight_kernels.cpu.fields import declarations_of, name_in_cpp
from inflight_kernels.cpu.instructions import Instruction
from inflight_kernels.cpu.matrix import MAX_GROUP_SIZE, InputFormat, SharedFormat, WeightFormat
from inflight_kernels.cpu.operations import KINDS, CacheFormat, Ids, Operation
from inflight_kernels.cpu.structures import STRUCTURES, Place, layout, structure_of
from inflight_kernels.moe.routing import GroupScore, Scores
from inflight_kernels.recurrent.gate import Gate

HEADER = Path(__file__).parent / "native" / "operation_fields.h"
_WIDTH = 120
_BEGIN = """\
// Made from operations.py by `python -m inflight_kernels.cpu.operation_header`: what changes here changes there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats.h"

namespace inflight {
"""
_END = """\
}  // namespace inflight
"""


ENUMS = (Place, Ids, Activation, Gate, CacheFormat, WeightFormat, InputFormat, SharedFormat, Scores, GroupScore)


def header() -> str:
    """The file's text, laid out as clang-format lays it out."""
    kinds = (_constant(kind.__name__) for kind in KINDS)
    parts = [
        _enum("Instruction", Instruction.__members__, inspect.getdoc(Instruction) or ""),
        _enum("Kind", kinds, "The first field of every operation."),
        *(_enum(each.__name__, each.__members__, inspect.getdoc(each) or "") for each in ENUMS),
        _max_group_size(),
        *map(_structure, STRUCTURES),
        _layout(),
    ]
    return "\n".join([_BEGIN, *parts, _END])


def _structure(structure: type[ctypes.Structure]) -> str:
    lines = list(_comment(_documentation(structure)))
    lines.append(f"struct {name_in_cpp(structure)} {{")
    for kind, names, *comments in declarations_of(structure):
        for comment in comments:
            lines += _comment(comment, "  ")
        lines.append(f"  {_declaration(kind if isinstance(kind, str) else name_in_cpp(kind), names.split())};")
    return "\n".join([*lines, "};", ""])


def _documentation(structure: type[ctypes.Structure]) -> str:
    """Its own, then that of each operation that has the same fields."""
    parts = [inspect.getdoc(structure) or ""]
    if issubclass(structure, Operation):
        others = [kind for kind in KINDS if kind is not structure and structure_of(kind) is structure]
        parts += [f"{_constant(kind.__name__)}: {inspect.getdoc(kind)}" for kind in others]
    return "\n\n".join(parts)


def _declaration(kind: str, names: list[str]) -> str:
    if kind.endswith("*") and len(names) > 1:
        return f"{kind[:-1]} {', '.join('*' + name for name in names)}"
    base, bracket, size = kind.partition("[")
    return f"{base} {', '.join(name + bracket + size for name in names)}"


def _enum(name: str, members: Iterable[str], documentation: str) -> str:
    members = list(members)
    begin, line = f"enum class {name} : int64_t {{", ", ".join(members)
    if len(f"{begin} {line} }};") <= _WIDTH:
        body = [f"{begin} {line} }};"]
    else:
        body = [begin, *(f"  {member}," for member in members), "};"]
    return "\n".join([*_comment(documentation), *body, ""])


def _max_group_size() -> str:
    comment = "Inputs of a group of codes, at most."
    return "\n".join([*_comment(comment), f"constexpr int64_t MAX_GROUP_SIZE = {MAX_GROUP_SIZE};", ""])


def _layout() -> str:
    """What library.py compares with ctypes."""
    comment = "Of every structure its size, then its fields' offsets: Python compares them with its own."
    lines = [*_comment(comment), "constexpr int64_t LAYOUT[] = {", *(f"    {each}," for each in layout()), "};", ""]
    return "\n".join(lines)


def _comment(text: str, indent: str = "") -> Iterator[str]:
    begin = f"{indent}///"
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            yield begin
        lines = textwrap.wrap(paragraph, _WIDTH - len(begin) - 1, break_long_words=False, break_on_hyphens=False)
        yield from (f"{begin} {line}" for line in lines)


def _constant(name: str) -> str:
    """RmsNorm -> RMS_NORM."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()


if __name__ == "__main__":
    HEADER.write_text(header(), encoding="utf-8")
