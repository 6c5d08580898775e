"""Formats of strings as regular expressions: what they match is of the format, in every case.

llguidance knows the names of some, but its expressions are wider than the RFCs: a 29 February of 2100, a second of 60
anywhere, labels of any length. Where an RFC bounds what no short expression counts (an e-mail address, a host), texts
that are longer than people write are left out. The numbers are those of RFC 3339 (dates and times), RFC 1123 (hosts),
RFC 5321 (addresses) and RFC 3986 (URIs).
"""

from __future__ import annotations

_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[048]|[2468][048]|[13579][26])00)"
"""Years with a 29 February."""
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,20}){0,2}"
"""Of at most 62 characters; RFC 1123 allows 63."""
_HOST = f"{_LABEL}(?:\\.{_LABEL}){{0,3}}"
"""Of at most 251 characters; RFC 1123 allows 253."""
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,15}"
_MAILBOX = f"{_ATOM}(?:\\.{_ATOM}){{0,3}}"
"""Of at most 63 characters; RFC 5321 allows 64."""
_ESCAPED = "%[0-9A-Fa-f]{2}"
_SEGMENT = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_ESCAPED})*"
_QUERY = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|{_ESCAPED})*"
_URL = f"[A-Za-z][A-Za-z0-9+.-]{{0,20}}://{_HOST}(?::[0-9]{{1,5}})?(?:/{_SEGMENT})*(?:\\?{_QUERY})?(?:#{_QUERY})?"
"""With an authority, and without user names in it."""
_URN = "urn:[A-Za-z0-9][A-Za-z0-9-]{0,29}[A-Za-z0-9]:[A-Za-z0-9._~!$&'()*+,;=:@/-]{1,255}"
"""RFC 8141, without escapes."""

PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "email": f"^{_MAILBOX}@{_HOST}$",
    "hostname": f"^{_HOST}$",
    "uri": f"^(?:{_URL}|{_URN})$",
}
OF_LIBRARY = frozenset({"duration", "ipv4", "ipv6", "uuid"})
"""Formats that llguidance enforces by their names."""
REFUSED = frozenset(
    {"idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer"}
    | {"uri-reference", "uri-template"}
)
"""Formats of draft 2020-12 (Validation, 7.3) that are not enforced."""
