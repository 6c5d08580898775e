"""A guide that cannot be followed exactly, and is therefore refused."""

from __future__ import annotations

from inflight.errors import InvalidRequest

Spot = tuple[str, str]
"""JSON pointer (RFC 6901) of a schema of the guide, and one of its keywords."""


class GuideRefused(InvalidRequest):
    """The sentence begins with "the guide ", by which every dialect knows which of its own fields to name."""

    def __init__(
        self,
        reason: str,
        *,
        pointer: str = "",
        keyword: str = "",
        is_final: bool = False,
        spots: tuple[Spot, ...] = (),
    ) -> None:
        """`reason`: what goes on behind "the guide ", as in "has a regular expression with look-ahead". `pointer`: JSON
        pointer (RFC 6901) of the schema that is refused, "" = the whole guide. `keyword`: of that schema, "" = none.
        `is_final`: whether it is malformed or beyond the bounds, so that leaving the keyword out is no way on. `spots`:
        what would have to be left out where the whole of it was read before it was refused; () = nothing helps."""
        at = f", at {keyword or 'the schema'} of {pointer or 'the root'}" if pointer or keyword else ""
        super().__init__(f"the guide {reason}{at}")
        self.reason = reason
        self.pointer = pointer
        self.keyword = keyword
        self.is_final = is_final
        self.spots = spots

    def within(self, pointer: str) -> GuideRefused:
        """The same of a schema that stands at `pointer` of the guide."""
        return GuideRefused(self.reason, pointer=pointer + self.pointer, keyword=self.keyword, is_final=self.is_final)
