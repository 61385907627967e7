"""Ids of tool calls in a streamed chat: a stream that is continued elsewhere repeats them."""

import json
import re
from collections.abc import Sequence
from functools import partial

import pytest

from gateway.answers.answer_reader import AnswerReader
from gateway.answers.chat_stream_writer import ChatStreamWriter
from gateway.answers.chunks import ChatChunks
from gateway.answers.sequence_text import Delta
from gateway.tools.formats import FORMATS

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO_CALLS = {
    "hermes": CALL + CALL,
    "mistral": "".join('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}' for _ in range(2)),
}
FORMS = {"hermes": "call_[0-9a-zA-Z]{24}", "mistral": "[0-9a-zA-Z]{9}"}


def written(kind: str, texts: Sequence[str], answer_id: str = "chatcmpl-1", index: int = 0) -> bytes:
    """Returns the chunks of an answer whose text comes in these pieces."""

    def reader() -> AnswerReader:
        parser = FORMATS[kind].make(["get_weather"])
        return AnswerReader(None, parser, one_call=False, show_thinking=True)

    writer = ChatStreamWriter(ChatChunks(answer_id, 1, "m", with_usage=False), reader, named=False)
    chunks = [writer.write(Delta(index, text)) for text in texts]
    return b"".join([*chunks, writer.write(Delta(index, "", "stop"))])


def call_ids(data: bytes) -> list[str]:
    """Returns the ids of the calls in some chunks."""
    events = [json.loads(event.removeprefix("data: ")) for event in data.decode().split("\n\n")[:-1]]
    deltas = [event["choices"][0]["delta"] for event in events]
    return [call["id"] for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]


@pytest.mark.parametrize("kind", TWO_CALLS)
def test_a_stream_that_is_written_again_has_the_same_call_ids(kind: str) -> None:
    """Byte for byte, on any gateway; in the format's own form, and another id for each call."""
    whole = written(kind, TWO_CALLS[kind])
    assert written(kind, TWO_CALLS[kind]) == whole
    first, second = call_ids(whole)
    assert first != second
    assert re.fullmatch(FORMS[kind], first)
    assert call_ids(written(kind, [TWO_CALLS[kind]])) == [first, second], "the pieces do not matter"


@pytest.mark.parametrize("kind", TWO_CALLS)
def test_calls_of_other_answers_and_choices_have_other_ids(kind: str) -> None:
    """Within one conversation, an id names one call."""
    write = partial(written, kind, [TWO_CALLS[kind]])
    ids = [*call_ids(write()), *call_ids(write(answer_id="chatcmpl-2")), *call_ids(write(index=1))]
    assert len(set(ids)) == 6


def test_an_id_of_the_model_is_kept() -> None:
    """Only ids that a parser made up are replaced."""
    text = '[TOOL_CALLS]get_weather[CALL_ID]my_own_id[ARGS]{"city": "Paris"}'
    assert call_ids(written("mistral", [text])) == ["my_own_id"]
