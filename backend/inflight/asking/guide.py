"""The grammar that an answer follows."""

from __future__ import annotations

import msgspec

from inflight.asking.tools.forms import Form
from inflight.guided_decoding import GuidedDecodingParams


class Guide(msgspec.Struct, frozen=True, kw_only=True):
    params: GuidedDecodingParams
    form: Form | None = None
    """The same as a part of tags: where the model may call tools, it calls some or answers in this form. None: such a
    grammar and that of calls exclude each other."""
