"""Calls as Python calls, as objects without quoted keys, and as elements, at every cut."""

import itertools
import json
import time
from typing import Any

import pytest

from gateway.parsers.call_reader import CallContext, CallReader
from gateway.parsers.elements_call import ElementsCall
from gateway.parsers.events import CallArguments, CallCounter, CallRevoked, CallStart, Event, Text, merged
from gateway.parsers.formats import Elements, LooseObject, Python
from gateway.parsers.loose_call import LooseCall
from gateway.parsers.python_call import PythonCall

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "zip": {"type": "string"},
        "n": {"$ref": "#/$defs/count"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"anyOf": [{"type": "object", "properties": {"zip": {"type": "string"}}}, {"type": "null"}]},
    },
    "$defs": {"count": {"type": "integer"}},
}
QUOTE = '<|"|>'
PREFIX = "]<]minimax[>["


def reader(form: str) -> CallReader:
    tools: dict[str, Any] = dict.fromkeys(("f", "a.b-c"), SCHEMA)
    context = CallContext(CallCounter(lambda: "id"), tools, is_marked=False, before="<")
    match form:
        case "python":
            return PythonCall(Python(), context)
        case "loose":
            return LooseCall(LooseObject(QUOTE), context)
    return ElementsCall(Elements(name_end='">\n', prefix=PREFIX), context)


def feed(form: str, parts: list[str]) -> tuple[list[Event], str]:
    """Returns the events of a call, and the text after it."""
    call, out = reader(form), list[Event]()
    for place, part in enumerate(parts, 1):
        rest = call.feed(part, out)
        if call.done or call.failed:
            if call.failed:
                call.give_up(out)
            return merged(out), rest + "".join(parts[place:])
    call.finish(out)
    return merged(out), ""


def read(form: str, text: str) -> tuple[list[Event], str]:
    """Returns the events and the text after the call, which are the same at every cut."""
    whole = feed(form, [text])
    assert feed(form, list(text)) == whole
    for at in range(1, len(text)):
        assert feed(form, [text[:at], text[at:]]) == whole, at
    return whole


def written(form: str, text: str) -> str:
    """Returns ``text`` with short marks replaced by the form's own."""
    return text.replace("~", {"python": "~", "loose": QUOTE}.get(form, PREFIX))


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        ("python", "f()", {}),
        ("python", " f( a = 1 ,)", {"a": 1}),
        ("python", "a.b-c(x=1)", {"x": 1}),
        ("python", "f(a='''it's''')", {"a": "it's"}),
        ("python", 'f(a="""\n"x" ""\\"""", b=\'\')', {"a": '\n"x" """', "b": ""}),
        ("python", "f(a={1: 2, None: 3, True: [], -1.5: {}})", {"a": {"1": 2, "null": 3, "true": [], "-1.5": {}}}),
        ("python", "f(a=-1, b=(1, [2]), c={'d': None}, e=true, g=null)", {"a": -1, "b": [1, [2]], "c": {"d": None}, "e": True, "g": None}),
        ("python", "f(a='x' \"y\"\n'z', b=r'\\d', c='\\d')", {"a": "xyz", "b": "\\d", "c": "\\d"}),
        ("python", "f(class='a)', lambda='b, c=[', größe=1)", {"class": "a)", "lambda": "b, c=[", "größe": 1}),
        ("loose", "f{}", {}),
        ("loose", "f{city:~Par\"is}, \n<|\"|~,n:5}", {"city": 'Par"is}, \n<|"|', "n": 5}),
        ("loose", "f{list:[~a~,~~],o:{k:true,l:[[],{}]}}", {"list": ["a", ""], "o": {"k": True, "l": [[], {}]}}),
        ("loose", "f{~a:b~:1.50,\"c\": null ,'d' = false,}", {"a:b": 1.5, "c": None, "d": False}),
        # A string parameter stays a text, a number in marks becomes a number.
        ("loose", "f{zip:12345,n:~5~,tags:[1,~2~],where:{zip:1}}", {"zip": "12345", "n": 5, "tags": ["1", "2"], "where": {"zip": "1"}}),
        # The model falls back to JSON's and Python's quotation marks, and to none.
        ("loose", "f{a:\"x, y\",b:'it\\'s',c:[\"\\u00e9\",'z'],d:two words,e:\"a\" or b,g:}", {"a": "x, y", "b": "it's", "c": ["é", "z"], "d": "two words", "e": '"a" or b', "g": ""}),
        ("loose", "f{a:\"line\nline\",b:'line\nline'}", {"a": "line\nline", "b": "line\nline"}),
        ("elements", 'f">~</', {}),
        ("elements", 'f">\n~<zip>5~</zip>\n~<n>5~</n>\n~<x>5~</x>~</', {"zip": "5", "n": 5, "x": 5}),
        ("elements", 'f">~<tags>~<item>1~</item>~<item>2~</item>~</tags>~<where>~<zip>1~</zip>~</where>~</', {"tags": ["1", "2"], "where": {"zip": "1"}}),
        ("elements", 'f">~<tags>~<tag>1~</tag>~</tags>~</', {"tags": ["1"]}),
        ("elements", 'f">~<tags>~</tags>~<where>~</where>~<zip>~</zip>~</', {"tags": [], "where": {}, "zip": ""}),
        ("elements", 'f">~<zip> <b>\n]<] &amp; ~</zip>~</', {"zip": " <b>\n]<] &amp; "}),
        # Without a schema, items are a list and elements an object; several of a name are a list.
        ("elements", 'f">~<u>~<item>1~</item>~</u>~<v>~<w>x~</w>t~</v>~<y>1~</y>~<y>2~</y>~</', {"u": [1], "v": {"w": "x", "$text": "t"}, "y": [1, 2]}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("after", ["", ") x", "<|tool|>"])
def test_calls(form: str, text: str, arguments: dict[str, Any], after: str) -> None:
    text = written(form, text)
    events, rest = read(form, text + after)
    start, fragment = events
    assert isinstance(start, CallStart)
    assert isinstance(fragment, CallArguments)
    assert json.loads(fragment.fragment) == arguments
    assert start.name == text.strip().partition("(")[0].partition("{")[0].partition('"')[0]
    assert rest == (PREFIX + "</" if form == "elements" else "") + after


@pytest.mark.parametrize(
    ("form", "text"),
    [
        *(("python", text) for text in [
            "g(a=1)", "f a", "f(1)", "f(a)", "f(a=)", "f(a=1, a=2)", "f(**{})", "f(a={**b})", "f(a={[]: 1})", "f(a=g())",
            "f(a=open('/etc/passwd').read())", "f(a=1e999)", "f(a=b'x')", "f(a=f'{x}')", "f(a=[)", "f(a=1 # no\n)", "f(a='", "f(a=1",
            "f(a='\\ud800')", "f(a={1e999: 1})", "f", "", "x" * 300 + "(", f"f(a={'[' * 100}{']' * 100})", "f(a=1, , b=2)", "f(a=foo)",
        ]),
        *(("loose", text) for text in ["g{}", "f", "f x", "f[", "x" * 300 + "{}", ""]),
        *(("elements", text) for text in [
            'g">~</', "f", 'f"', 'f" x', 'f">text~</', 'f">~<a>1', 'f">~<a>1~</b>~</', 'f">~<a>1~</a', 'f">~x', 'f">~<>', 'f">~< >', 'f">~<a>~</a>text~</',
            'f">' + "~<a>" * 101, 'f">~<' + "a" * 300, "x" * 300,
        ]),
    ],
)  # fmt: skip
def test_other_text_is_content(form: str, text: str) -> None:
    """Text that is no call is content, and all of it is still there."""
    events, rest = read(form, written(form, text))
    (shown,) = events
    assert isinstance(shown, Text)
    assert shown.text + rest == "<" + written(form, text)


@pytest.mark.parametrize(
    "text",
    ["f{:1}", "f{a:1]", "f{a:~x~y}", "f{a:[~x~}", "f{a}", "f{,{}", f"f{{{'a' * 300}:1}}", "f{" + "a:{" * 101],
)
def test_a_malformed_object_is_revoked(text: str) -> None:
    events, rest = read("loose", written("loose", text))
    revoked = events[-1]
    assert isinstance(revoked, CallRevoked)
    assert revoked.source + rest == "<" + written("loose", text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("f{", "{"),
        ("f{a", "{a"),
        ("f{a:~x<", '{"a": "x<'),
        ("f{a:1", '{"a": 1'),
        ("f{n:~5", '{"n": 5'),
        ("f{a:'x", '{"a": \'x'),
        ("f{a:[1,{", '{"a": [1, {'),
    ],
)
def test_an_object_that_is_cut_off_is_shown_as_far_as_it_came(text: str, shown: str) -> None:
    events, _ = read("loose", written("loose", text))
    assert events == [CallStart(0, "id", "f"), CallArguments(0, shown)]


def test_the_end_of_an_invoke_may_be_missing() -> None:
    text = f'f">{PREFIX}<zip>1{PREFIX}</zip>'
    for end in ["", "\n", PREFIX[:4], PREFIX, f"{PREFIX}<"]:
        assert read("elements", text + end)[0][1:] == [CallArguments(0, '{"zip": "1"}')]


def test_texts_of_objects_arrive_as_they_are_written() -> None:
    call, out = reader("loose"), list[Event]()
    lengths = []
    for part in [f"f{{a:{QUOTE}", *["word "] * 5, QUOTE]:
        call.feed(part, out)
        lengths.append(sum(len(event.fragment) for event in out if isinstance(event, CallArguments)))
    assert all(earlier < later for earlier, later in itertools.pairwise(lengths))


@pytest.mark.parametrize(
    ("form", "begin", "piece"),
    [
        ("python", "f(a='", "word "),
        ("python", "f(a=[", "'x', "),
        ("loose", f"f{{a:{QUOTE}", "word "),
        ("loose", "f{a:'", "word "),
        ("loose", "f{a:", "word "),
        ("loose", "f{a:[", "1,"),
        ("elements", f'f">{PREFIX}<a>', "word "),
        ("elements", f'f">{PREFIX}<a>', f"{PREFIX}<b>1{PREFIX}</b>"),
    ],
)
def test_the_time_for_a_long_call_grows_with_it(form: str, begin: str, piece: str) -> None:
    def seconds(count: int) -> float:
        call, out = reader(form), list[Event]()
        call.feed(begin, out)
        started = time.process_time()
        for _ in range(count):
            call.feed(piece, out)
        call.finish(out)
        return time.process_time() - started

    assert min(seconds(20_000) for _ in range(3)) < 30 * min(seconds(2_000) for _ in range(3))
