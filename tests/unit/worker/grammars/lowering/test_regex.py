"""Regular expressions are rewritten to forms that xgrammar matches as intended, or refused."""

import re
import time

import pytest

from protos.errors import InvalidArgument
from worker_svc.grammars.lowering.regex import lower_regex


@pytest.mark.parametrize(
    "escape",
    [r"\012", r"\00", r"\07", r"\12", r"\x4", r"\x", r"\u12", r"\u{}", r"\u{g}", r"\c1", r"\c", r"\q", r"\B", r"\é", "\\\u0663"],
)  # fmt: skip
@pytest.mark.parametrize("form", ["{}", "[{}]", "[^{}]", "[!-{}]", "[{}-~]", "[a{}]", "a{}"])
def test_unknown_incomplete_and_octal_escapes_are_refused(escape: str, form: str) -> None:
    """No such escape matches the letters of its spelling, in a class or outside, in JSON or alone."""
    pattern = form.format(escape)
    with pytest.raises(InvalidArgument, match="cannot be enforced"):
        lower_regex(pattern)
    with pytest.raises(InvalidArgument, match="cannot be enforced"):
        lower_regex(pattern, in_json=True)


@pytest.mark.parametrize(
    ("pattern", "text", "inside"),
    [
        (r"[^\0-\x1f]", r"[^\x00-\x1f]", r"[^\x00-\x1f]"),
        (r"[^\0]", r"[^\x00]", r"[^\x00]"),
        (r"[\0-9]", r"[\x01-9]", None),
        (r"[\0a]", "[a]", None),
        (r"[\\0]", r"[0\\]", None),
        (r"[\0]", None, None),
    ],
)
def test_an_escaped_zero_in_a_class_is_nul(pattern: str, text: str | None, inside: str | None) -> None:
    """NUL never matches, alone or in JSON. `None` marks classes with nothing left to enforce."""
    for expected, in_json in ((text, False), (inside, True)):
        if expected is None:
            with pytest.raises(InvalidArgument):
                lower_regex(pattern, in_json=in_json)
        else:
            same = lower_regex(expected, in_json=in_json)
            assert lower_regex(pattern, in_json=in_json) == same


def test_sets_in_json_exclude_escaped_and_ambiguous_characters() -> None:
    r"""Sets lose the characters that JSON must escape, and \S loses spaces that engines disagree on."""
    assert lower_regex("^[ -~][^a].$", in_json=True) == (
        r"^[ -!#-,\-.-\[\]_-~\^]"
        r"[ -!#-,\-.-\[\]_-`b-~\x7f-\u{d7ff}\u{e000}-\u{10ffff}\^]"
        r"[ -!#-,\-.-\[\]_-~\x7f-\u{2027}\u{202a}-\u{d7ff}\u{e000}-\u{10ffff}\^]$"
    )
    rare = lower_regex("\\S", in_json=True)
    assert not any(
        re.fullmatch(re.sub(r"\\u\{(.*?)\}", lambda hit: chr(int(hit[1], 16)), rare), char)
        for char in "\u2028\u3000\ufeff \x85"
    )


def test_unclosed_classes_are_refused_in_linear_time() -> None:
    """A long run of open brackets is tokenized once."""
    started = time.thread_time()
    with pytest.raises(InvalidArgument, match="not closed"):
        lower_regex("[" * 200_000 + "$a")
    assert time.thread_time() - started < 1.0
