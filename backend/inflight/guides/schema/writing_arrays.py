"""Facts about arrays, written as schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, permutations
from typing import TYPE_CHECKING, Any

from inflight.guides.schema.expansion import MAX_ALTERNATIVES
from inflight.guides.schema.facts import Array, Boolean, Claim, Null, Number, String, least
from inflight.guides.schema.writing_numbers import plain

if TYPE_CHECKING:
    from inflight.guides.schema.writing import Schema, Writing

COUNTS = ("maxItems", "minItems")
MAX_POSITION = 12
"""Before which item of an array without `maxItems` those that `contains` counts are generated. Arrays whose first such
item stands later are instances, too, but are not generated: no schema of fixed size stands for them."""


def counted(writing: Writing, fact: Array) -> Iterator[Array]:
    """`fact` without `contains`, as arrays with their items at fixed places."""
    if not fact.contains:
        yield fact
        return
    one, rest = fact.contains[0], replace(fact, contains=fact.contains[1:])
    limit = min(MAX_POSITION, MAX_POSITION if fact.longest is None else fact.longest)
    if one.least > MAX_POSITION:
        raise writing.refusal(f"counts more than {MAX_POSITION} items", "contains")
    denied = replace(one.claim, holds=False)
    counts = range(one.least, (one.least if one.most is None else min(one.most, limit)) + 1)
    found = 0
    for count in counts:
        for places in combinations(range(limit), count):
            found += 1
            if found > MAX_ALTERNATIVES:
                raise writing.refusal(f"needs more than {MAX_ALTERNATIVES} alternatives", "contains")
            writing.expansion.charge(10, writing.place, "contains")
            items: list[tuple[int, int | None, Claim]] = [(i, i + 1, one.claim) for i in places]
            if one.most is not None:
                free = [i for i in range(limit) if i not in places]
                items += [(i, i + 1, denied) for i in free] + [(limit, None, denied)]
            made = rest.merged(Array(places[-1] + 1 if places else 0, items=tuple(items)))
            if made is not None:
                yield from counted(writing, made)


def write_array(writing: Writing, fact: Array) -> Iterator[Schema]:
    if fact.is_unique and (fact.longest is None or fact.longest > 1):
        unique = unique_lists(writing, fact)
        if unique is not None:
            yield {"enum": unique} if unique else False
            return
    stops = [stop or start for start, stop, _ in fact.items]
    size = max(stops, default=0)
    if size > MAX_ALTERNATIVES or fact.shortest > 4096 or (fact.longest or 0) > 4096:
        raise writing.refusal("counts more than 4096 items", *(COUNTS if fact.longest else COUNTS[::-1]))
    prefix: list[Schema] = []
    longest = fact.longest
    for index in range(size if longest is None else min(size, longest)):
        schema = writing.write(fact.claims(index))
        if schema is False:
            longest = index
            break
        prefix.append(schema)
    tail = writing.write(fact.claims(size)) if longest is None or longest > size else False
    if tail is False:
        longest = least(longest, len(prefix))
    if longest is not None and longest < fact.shortest:
        yield False
        return
    schema = {"type": "array"}
    if prefix:
        schema["prefixItems"] = prefix
    if tail is not True:
        schema["items"] = tail
    if fact.shortest:
        schema["minItems"] = fact.shortest
    if longest is not None and tail is not False:
        schema["maxItems"] = longest
    yield schema


def listed_values(writing: Writing, claims: frozenset[Claim]) -> list[Any] | None:
    """All values that something with `claims` can have. None: not a finite number that is at hand."""
    out: list[Any] = []
    for fact in writing.expansion.all_of(claims):
        if isinstance(fact, Null):
            out.append(None)
        elif isinstance(fact, Boolean):
            out += sorted(fact.values)
        elif isinstance(fact, Number) and fact.values is not None:
            out += [plain(writing, value, "uniqueItems") for value in sorted(fact.values)]
        elif isinstance(fact, Number) and fact.is_integer and fact.low is not None and fact.high is not None:
            if fact.high - fact.low > 8:
                return None
            span = range(fact.low.__floor__(), fact.high.__floor__() + 1)
            out += [value for value in span if fact.takes(Fraction(value))]
        elif isinstance(fact, String) and fact.values is not None and not fact.patterns + fact.formats:
            out += sorted(fact.values)
        else:
            return None
    return list({json.dumps(value): value for value in out}.values())


def unique_lists(writing: Writing, fact: Array) -> list[list[Any]] | None:
    size = max((stop or start for start, stop, _ in fact.items), default=0)
    sets = [listed_values(writing, fact.claims(index)) for index in range(size + 1)]
    if any(values is None for values in sets):
        refused = writing.refusal("asks for unique items of values that are not listed", "uniqueItems")
        writing.expansion.omissions.drop(refused, refused.spots)
        return None
    known = [[json.dumps(value) for value in values or []] for values in sets]
    every = list(dict.fromkeys(value for values in known for value in values))
    found: list[list[Any]] = []
    for length in range(fact.shortest, len(every) + 1 if fact.longest is None else min(fact.longest, len(every)) + 1):
        for tried, row in enumerate(permutations(every, length)):
            if all(value in known[min(i, size)] for i, value in enumerate(row)):
                found.append([json.loads(value) for value in row])
            if len(found) > MAX_ALTERNATIVES or tried > 20 * MAX_ALTERNATIVES:
                raise writing.refusal(f"needs more than {MAX_ALTERNATIVES} alternatives", "uniqueItems")
    return found
