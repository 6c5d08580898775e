"""The page as it goes over HTTP."""

from __future__ import annotations

import re
from pathlib import Path

INDEX = (Path(__file__).parent / "index.html").read_bytes()

_POLICY = re.search(rb'http-equiv="Content-Security-Policy" content="([^"]*)"', INDEX)
assert _POLICY is not None, "the page names what it may load"

HEADERS = {
    # What the page says of itself, and what a page cannot say: nobody may show it in a frame.
    "content-security-policy": f"{_POLICY[1].decode()}; frame-ancestors 'none'",
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
