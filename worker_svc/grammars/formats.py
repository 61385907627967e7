"""Expressions for the `format` keyword. Each matches only texts accepted by every strict parser.

This may be less than the standard allows. The expressions built into xgrammar 0.2.8 are not used: they allow
30 February and IPv4 addresses such as 01.2.3.4.
"""

from typing import Final

_YEAR: Final = "[12][0-9]{3}"
_LEAP: Final = "(?:[12][0-9](?:0[48]|[2468][048]|[13579][26])|2[048]00|1[26]00)"
_DATE: Final = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_HOUR: Final = "(?:[01][0-9]|2[0-3])"
_TIME: Final = f"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"
_NUMBER: Final = "[0-9]{1,4}"
_DAYS: Final = f"(?:{_NUMBER}Y(?:{_NUMBER}M(?:{_NUMBER}D)?)?|{_NUMBER}M(?:{_NUMBER}D)?|{_NUMBER}D)"
_HOURS: Final = f"T(?:{_NUMBER}H(?:{_NUMBER}M(?:{_NUMBER}S)?)?|{_NUMBER}M(?:{_NUMBER}S)?|{_NUMBER}S)"
_LABEL: Final = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?"
_HOST: Final = f"{_LABEL}(?:\\.{_LABEL}){{0,4}}"
_ATOM: Final = "[a-zA-Z0-9_+-]{1,20}"
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX: Final = "[0-9a-fA-F]"
_GROUP: Final = f"{_HEX}{{1,4}}"
_PATH: Final = "[a-zA-Z0-9._~-]*"
_TAIL: Final = "(?:\\?[a-zA-Z0-9._~=&-]*)?(?:#[a-zA-Z0-9._~-]*)?"
_URI: Final = f"(?:https?|ftp|urn|file|wss?)://{_HOST}(?::[1-9][0-9]{{0,3}})?(?:/{_PATH})*{_TAIL}"
_POINTER: Final = "(?:/(?:[a-zA-Z0-9_. -]|~[01])*)*"

FORMATS: Final[dict[str, str]] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|{_NUMBER}W)",
    "email": f"{_ATOM}(?:\\.{_ATOM}){{0,2}}@{_LABEL}(?:\\.{_LABEL}){{1,3}}",
    "hostname": _HOST,
    "ipv4": f"{_BYTE}(?:\\.{_BYTE}){{3}}",
    "ipv6": f"(?:(?:{_GROUP}:){{7}}{_GROUP}|(?:{_GROUP}(?::{_GROUP}){{0,2}})?::(?:{_GROUP}(?::{_GROUP}){{0,3}})?)",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": _URI,
    "uri-reference": f"(?:{_URI}|/{_PATH}(?:/{_PATH})*{_TAIL})",
    "uri-template": "(?:[a-zA-Z0-9._~/-]|\\{[a-zA-Z_][a-zA-Z0-9_]*\\})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,4}})(?:#|{_POINTER})",
}
"""Expressions by format name; each describes the whole text and has no anchors."""
