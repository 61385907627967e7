"""Reads random tool calls in every format, streamed in random pieces, and times the parsers.

``python -m tests.bench.answer_texts [--quick]`` needs no model. Random tools and calls (nested values,
quotes, markers within texts, empty arguments) are written as each entry of the table says, with text before
them. Each text is read whole, letter by letter, and cut at random places.

- ``right``: the part of the readings with exactly the calls and the text that were written.
- ``text``, ``call``: time per token of a format's parser to hermes', in plain text and within a call.
"""

import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.generation.answer_plan import AnswerReader
from gateway.openai.chat import CollectedMessage
from gateway.parsers.formats import FORMATS, Format
from gateway.parsers.machine import CallParser
from gateway.parsers.writing import Call, write
from tests.bench.support.report import parser, report
from tests.support.parsers.writer import Tools, tools_and_calls

_CUTS: Final = 20
_WORDS: Final = ("Let", " me", " see", ",", " it", " is 5 <", " 6", ".\n")
_ROUNDS: Final = 15


def cut(text: str, places: Sequence[int]) -> list[str]:
    """Returns the pieces of a text."""
    borders = [0, *sorted(places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


def read(form: Format, tools: Tools, pieces: Sequence[str]) -> tuple[Any, list[tuple[str, Any]]]:
    """Returns the content and the calls of an answer that arrives in pieces."""
    reader = AnswerReader(None, CallParser(form, tools))
    events = [event for piece in pieces for event in reader.feed(piece)]
    body = CollectedMessage.from_events([*events, *reader.finish()]).body(with_reasoning=False)
    calls = [call["function"] for call in body.get("tool_calls", [])]
    return body["content"], [(call["name"], json.loads(call["arguments"])) for call in calls]


def campaign(form: Format, num_texts: int, seed: int) -> tuple[int, int, int]:
    """Reads random answers of a format; returns the numbers of texts, of readings, and of wrong ones."""
    counts = {"texts": 0, "readings": 0, "wrong": 0}
    chance = random.Random(seed)

    @settings(max_examples=num_texts, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(tools_and_calls(form), st.booleans())
    def run(drawn: tuple[Tools, list[Call]], has_text: bool) -> None:
        tools, calls = drawn
        before = "Let me see.\n" if has_text and form.trigger else ""
        text = before + write(form, calls)
        expected = (before.strip() or None, [(call.name, call.arguments) for call in calls])
        places = [chance.sample(range(len(text)), min(len(text), chance.randint(1, 6))) for _ in range(_CUTS)]
        pieces = [[text], list(text), *(cut(text, each) for each in places)]
        counts["texts"] += 1
        for each in pieces:
            counts["readings"] += 1
            counts["wrong"] += read(form, tools, each) != expected

    run()
    return counts["texts"], counts["readings"], counts["wrong"]


def us_per_token(form: Format, tokens: Sequence[str]) -> float:
    """Returns the least time of several rounds."""
    times = []
    for _ in range(_ROUNDS):
        calls = CallParser(form, {"f": {"type": "object", "properties": {"city": {"type": "string"}}}})
        start = time.perf_counter()
        for token in tokens:
            calls.feed(token)
        calls.finish()
        times.append((time.perf_counter() - start) / len(tokens) * 1e6)
    return min(times)


def main() -> None:
    """Reads, times and reports."""
    options = parser(__doc__, "15 texts of each format instead of 300").parse_args()
    num_texts = 15 if options.quick else 300
    totals = [0, 0, 0]
    times: dict[str, tuple[float, float]] = {}
    for number, (name, form) in enumerate(FORMATS.items()):
        counts = campaign(form, num_texts, number)
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        written = write(form, [Call("f", {"city": "Paris is " * 200})])
        call = [written[at : at + 4] for at in range(0, len(written), 4)]
        times[name] = us_per_token(form, _WORDS * 100), us_per_token(form, call)
        print(f"{name:16} {counts[1]:7} readings, {counts[2]} wrong, {times[name][0]:.2f} us a token of text,"
              f" {times[name][1]:.2f} of a call")  # fmt: skip
    texts, readings, wrong = totals
    own = times["hermes"]
    report(
        "answer_texts",
        {
            "formats": len(FORMATS),
            "texts": texts,
            "readings": readings,
            "us_per_token": {name: [round(value, 2) for value in pair] for name, pair in times.items()},
        },
        {
            "right": 1 - wrong / readings,
            "text": statistics.median(pair[0] for pair in times.values()) / own[0],
            "call": statistics.median(pair[1] for pair in times.values()) / own[1],
        },
    )


if __name__ == "__main__":
    main()
