"""The anchor of a heading, as code hosts make it: a link to a heading works there and on the site."""

from __future__ import annotations

import re


def anchor(title: str, separator: str = "-") -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)
