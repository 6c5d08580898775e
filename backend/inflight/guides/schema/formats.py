"""Formats of strings as regular expressions: what matches all those of a format is of the format, in every case.

llguidance knows the names of some, but its expressions are wider than the RFCs: a 29 February of 2100, a second of 60
anywhere, labels of any length. Left out are labels of punycode, whose validity no expression tells, leap seconds in
other offsets than UTC's, and quoted names of mailboxes with an @. The numbers are those of
RFC 3339 (dates and times), RFC 1123 (hosts), RFC 5321 (mailboxes), RFC 4291 (addresses), RFC 3986 and 3987 (URIs and
IRIs), RFC 6570 (templates) and RFC 6901 (pointers).
"""

from __future__ import annotations

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[048]|[2468][048]|[13579][26])00)"
"""Years with a 29 February."""
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_FRACTION = "(?:\\.[0-9]{1,9})?"
_TIME = (
    f"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    f"|23:59:60{_FRACTION}(?:[Zz]|[+-]00:00))"
)

_LABEL = "[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"
_HOST = f"{_LABEL}(?:\\.{_LABEL})*"
_HOST_LENGTHS = "[^.@]{1,63}(?:\\.[^.@]{1,63})*"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = f"{_BYTE}(?:\\.{_BYTE}){{3}}"


def _ipv6() -> str:
    group = "[0-9A-Fa-f]{1,4}"
    last = f"(?:{group}:{group}|{_IPV4})"
    ways = [
        f"(?:{group}:){{6}}{last}",
        f"(?:{group}(?::{group}){{0,6}})?::",
        f"(?:{group}(?::{group}){{0,5}})?::{group}",
    ]
    # Behind `::` stand `number` groups and the last two, before it as many as leave one out.
    for number in range(6):
        most = 4 - number
        before = "" if most < 0 else f"(?:{group}(?::{group}){{0,{most}}})?"
        ways.append(f"{before}::(?:{group}:){{{number}}}{last}")
    return f"(?:{'|'.join(ways)})"


_IPV6 = _ipv6()
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_QUOTED = '"(?:[\\x20\\x21\\x23-\\x3F\\x41-\\x5B\\x5D-\\x7E]|\\\\[\\x20-\\x3F\\x41-\\x7E])*"'
"""Without @, so that the other expressions, which bound the lengths, find the end of the name."""
_MAILBOX = f"(?:{_ATOM}(?:\\.{_ATOM})*|{_QUOTED})@(?:{_HOST}|\\[(?:{_IPV4}|IPv6:{_IPV6})\\])"

_ESCAPED = "%[0-9A-Fa-f]{2}"
_INTERNATIONAL = (
    "\\u{A0}-\\u{D7FF}\\u{F900}-\\u{FDCF}\\u{FDF0}-\\u{FFEF}"
    + "".join(f"\\u{{{plane:X}0000}}-\\u{{{plane:X}FFFD}}" for plane in range(1, 14))
).replace("\\u{E0000}", "\\u{E1000}")
"""RFC 3987, 2.2: `ucschar`."""
_PRIVATE = "\\u{E000}-\\u{F8FF}\\u{F0000}-\\u{FFFFD}\\u{100000}-\\u{10FFFD}"


def _references(more: str, more_of_query: str) -> tuple[str, str]:
    """URIs, and references that may lack a scheme. `more`: characters beside those of RFC 3986, without brackets."""
    plain = f"A-Za-z0-9._~!$&'()*+,;=\\-{more}"
    character = f"(?:[{plain}:@]|{_ESCAPED})"
    host = f"(?:\\[(?:{_IPV6}|[vV][0-9A-Fa-f]+\\.[A-Za-z0-9._~!$&'()*+,;=:-]+)\\]|(?:[{plain}]|{_ESCAPED})*)"
    authority = f"//(?:(?:[{plain}:]|{_ESCAPED})*@)?{host}(?::[0-9]*)?(?:/{character}*)*"
    absolute = f"/(?:{character}+(?:/{character}*)*)?"
    tail = f"(?:\\?(?:[{plain}:@/?{more_of_query}]|{_ESCAPED})*)?(?:#(?:[{plain}:@/?]|{_ESCAPED})*)?"
    scheme = "[A-Za-z][A-Za-z0-9+.-]*:"
    rootless = f"{character}+(?:/{character}*)*"
    without_colon = f"(?:[{plain}@]|{_ESCAPED})+(?:/{character}*)*"
    uri = f"{scheme}(?:{authority}|{absolute}|{rootless})?{tail}"
    reference = f"(?:(?:{scheme})?(?:{authority}|{absolute})|{scheme}(?:{rootless})?|{without_colon})?{tail}"
    return uri, reference


_URI, _URI_REFERENCE = _references("", "")
_IRI, _IRI_REFERENCE = _references(_INTERNATIONAL, _PRIVATE)
_VARIABLE = f"(?:[A-Za-z0-9_]|{_ESCAPED})(?:\\.?(?:[A-Za-z0-9_]|{_ESCAPED}))*(?::[1-9][0-9]{{0,3}}|\\*)?"
_TEMPLATE = (
    f"(?:[\\x21\\x23\\x24\\x26\\x28-\\x3B=\\x3F-\\x5B\\x5D_a-z~{_INTERNATIONAL}{_PRIVATE}]|{_ESCAPED}"
    f"|\\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\\}})*"
)
_POINTER = "(?:/(?:[^~/]|~[01])*)*"

PATTERNS: dict[str, tuple[str, ...]] = {
    "date": (f"^{_DATE}$",),
    "time": (f"^{_TIME}$",),
    "date-time": (f"^{_DATE}[Tt]{_TIME}$",),
    "email": (f"^{_MAILBOX}$", f"^[^@]{{1,64}}@(?:\\[.*|{_HOST_LENGTHS})$", "^[^@]*@.{1,253}$"),
    "hostname": (f"^{_HOST}$", f"^{_HOST_LENGTHS}$", "^.{1,253}$"),
    "ipv6": (f"^{_IPV6}$",),
    "uri": (f"^{_URI}$",),
    "uri-reference": (f"^{_URI_REFERENCE}$",),
    "iri": (f"^{_IRI}$",),
    "iri-reference": (f"^{_IRI_REFERENCE}$",),
    "uri-template": (f"^{_TEMPLATE}$",),
    "json-pointer": (f"^{_POINTER}$",),
    "relative-json-pointer": (f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",),
}
OF_LIBRARY = frozenset({"duration", "ipv4", "uuid"})
"""Formats that llguidance enforces by their names."""
REFUSED = frozenset({"idn-email", "idn-hostname", "regex"})
"""Formats of draft 2020-12 (Validation, 7.3) that are not enforced."""
