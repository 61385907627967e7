"""Formats of thinking: every entry, at every cut of the text."""

import json
from collections.abc import Iterable
from typing import Any, Final

import pytest

from gateway.generation.answer_plan import AnswerReader
from gateway.openai.chat import CollectedMessage
from gateway.parsers.formats import FORMATS
from gateway.parsers.machine import CallParser
from gateway.parsers.reasoning import (
    THINK,
    THINKING_ALIASES,
    THINKING_FORMATS,
    Thinking,
    ThinkParser,
    thinking_at,
)

OPEN, POSSIBLE, OVER, ANSWER = Thinking

Parts = tuple[str | None, str | None]


def read(reader: AnswerReader, pieces: Iterable[str]) -> Any:
    events = [event for piece in pieces for event in reader.feed(piece)]
    return CollectedMessage.from_events([*events, *reader.finish()]).body(with_reasoning=True)


def parts(name: str, at: Thinking, pieces: Iterable[str]) -> Parts:
    """Returns the thinking and the content of a text that comes in ``pieces``."""
    body = read(AnswerReader(ThinkParser(at, THINKING_FORMATS[name]), None), pieces)
    assert body["reasoning"] == body["reasoning_content"]
    return body["reasoning"], body["content"]


def cuts(text: str) -> Iterable[list[str]]:
    """Yields ``text`` whole, in single characters, in two pieces, and in threes."""
    yield [text]
    yield list(text)
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))
    yield [text[at : at + 3] for at in range(0, len(text), 3)]


# Where the answer begins, its text, the thinking, the content.
CASES: Final[dict[str, list[tuple[Thinking, str, str | None, str | None]]]] = {
    "qwen3": [
        (POSSIBLE, "<think>\nHm.\n</think>\n\nParis.", "Hm.", "Paris."),
        (POSSIBLE, "\n<think>Hm.</think>Paris. ", "Hm.", "Paris. "),
        (POSSIBLE, "Paris.\n", None, "Paris.\n"),
        (POSSIBLE, "Paris, not <think>x</think>.", None, "Paris, not <think>x</think>."),
        (POSSIBLE, "<think>\n\n</think>\n\nParis.", None, "Paris."),
        (POSSIBLE, "</think>\n\nParis.", None, "Paris."),
        (POSSIBLE, "Hm.\n</think>\n\nParis.", None, "Hm.\n</think>\n\nParis."),
        (POSSIBLE, "<thin", None, "<thin"),
        (OPEN, "\nHm.\n</think>\n\nParis.", "Hm.", "Paris."),
        (OPEN, "<think>\nHm.\n</think>\n\nParis.", "Hm.", "Paris."),
        (OPEN, "Hm. I wonder </thi", "Hm. I wonder </thi", None),
        (OPEN, "Hm.\n\nWell.", "Hm.\n\nWell.", None),
        (OPEN, "Hm.</think>", "Hm.", None),
        (OPEN, "a</think>b</think>c", "a", "b</think>c"),
        (OPEN, "<response>b", "<response>b", None),
        (OVER, "Paris</think>", None, "Paris</think>"),
    ],
    "deepseek_r1": [(OPEN, "Hm. So.</think>It is so.", "Hm. So.", "It is so.")],
    "deepseek_v3": [(OPEN, "Hm.</think>Ok.", "Hm.", "Ok."), (POSSIBLE, "Hello.", None, "Hello.")],
    "deepseek_v4": [(OPEN, "Hm.</think>Ok.", "Hm.", "Ok.")],
    "granite": [
        (POSSIBLE, "Hello big world.", None, "Hello big world."),
        (POSSIBLE, "Here is my thought process: A b. Here is my response: C d.", "A b.", "C d."),
        (POSSIBLE, "Here's my thought process:\nA b.\n\nHere's my response:\nC d.", "A b.", "C d."),
        (POSSIBLE, "Here is my thought process: A b.", "A b.", None),
        (POSSIBLE, "Here is my cat.", None, "Here is my cat."),
        (POSSIBLE, "<think>A b.</think><response>C d.</response>", "A b.", "C d."),
    ],
    "gemma4": [
        (POSSIBLE, "<|channel>thought\nHm.<channel|>Ok.", "Hm.", "Ok."),
        (POSSIBLE, "<|channel>thought\n<channel|>Ok.", None, "Ok."),
        (OPEN, "Hm.\n<channel|>Ok.", "Hm.", "Ok."),
        (POSSIBLE, "Hello big world.", None, "Hello big world."),
    ],
    "minimax_m3": [
        (POSSIBLE, "<mm:think>Hm.</mm:think>Ok.", "Hm.", "Ok."),
        (POSSIBLE, "</mm:think>Ok.", None, "Ok."),
        (OPEN, "Hm.</mm:think>Ok.", "Hm.", "Ok."),
    ],
    "seed_oss": [(POSSIBLE, "<seed:think>Hm.</seed:think>Ok.", "Hm.", "Ok.")],
    "mistral": [
        (POSSIBLE, "[THINK]Hm.[/THINK]Ok.", "Hm.", "Ok."),
        (POSSIBLE, "<think>\nHm.\n</think>\nOk.", "Hm.", "Ok."),
        (POSSIBLE, "Hello big world.", None, "Hello big world."),
        (POSSIBLE, "[THINGS] are so.", None, "[THINGS] are so."),
    ],
    "ernie45": [
        (OPEN, "abc\n</think>\n\n<response>\ndef\n</response>\n", "abc", "def"),
        (OPEN, "abc\n</think>\ndef", "abc", "def"),
        (OPEN, "abc</think><response>def</response>", "abc", "def"),
        (OPEN, "<response>\n  def\n</response>", None, "  def"),
        (OPEN, "abc</think>a </response> in an answer", "abc", "a </response> in an answer"),
        (OVER, "<response>\nde</resp\n\n</response>\nf", None, "de</resp\n\nf"),
    ],
    "hunyuan_a13b": [
        (POSSIBLE, "<think>\nHm.\n</think>\n<answer>\nOk.\n\nSo.\n</answer>", "Hm.", "Ok.\n\nSo."),
        (POSSIBLE, "<think>\nHm.\n</think>\n<answer>\nOk.", "Hm.", "Ok."),
        (POSSIBLE, "<answer>\nOk.\n</answer>", None, "Ok."),
        (POSSIBLE, "Hello big world.", None, "Hello big world."),
    ],
    "cohere": [
        (POSSIBLE, "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Ok.<|END_RESPONSE|>", "Hm.", "Ok."),
        (POSSIBLE, "<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>Ok.<|END_TEXT|>", "Hm.", "Ok."),
        (OVER, "<|START_RESPONSE|>Ok.<|END_RESPONSE|>", None, "Ok."),
        (ANSWER, "Ok.<|END_RESPONSE|>", None, "Ok."),
    ],
    "kimi_k3": [
        (POSSIBLE, "<|open|>response<|sep|>Hello.<|close|>response<|sep|><|close|>message<|sep|>", None, "Hello."),
        (POSSIBLE, "<|open|>response<|sep|>Hello. It is", None, "Hello. It is"),
        (OPEN, "Hm.<|close|>think<|sep|><|open|>response<|sep|>Ok.<|close|>response<|sep|>", "Hm.", "Ok."),
        (POSSIBLE, "<|open|>think<|sep|>Hm.<|close|>think<|sep|>Ok.<|close|>message<|sep|>", "Hm.", "Ok."),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", THINKING_FORMATS)
def test_every_cut_yields_the_same_thinking_and_answer(name: str) -> None:
    """Both come without their markers and without the white space between them; all other text is kept."""
    for at, text, reasoning, content in CASES[name]:
        assert {parts(name, at, pieces) for pieces in cuts(text)} == {(reasoning, content)}, text


CALL: Final = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "num_calls"),
    [
        (f"I need it.\n{CALL}", "I need it.", None, 1),
        (f"<think>I need it.{CALL}\n{CALL}", "I need it.", None, 2),
        (f"I need it.\n</think>\n\n{CALL}", "I need it.", None, 1),
        (f"I need it.\n{CALL}\n</think>\n\nSo be it.", "I need it.", "So be it.", 1),
        (f"I need it.\n{CALL}\nSo be it.", "I need it.", "So be it.", 1),
        # No calls: such text stays a part of the thinking.
        ("Use <tool_call> here.</think>Ok.", "Use <tool_call> here.", "Ok.", 0),
        ("Use <tool_call>", "Use <tool_call>", None, 0),
        ("A <tool_cal> is no call.\n</think>\nOk.", "A <tool_cal> is no call.", "Ok.", 0),
        ('Hm.<tool_call>{"name": "get_time", "arguments": {"a": "</think>"}}</tool_call></think>Ok.', "Hm.", "Ok.", 1),
        # After the thinking, there is nothing to interrupt.
        (f"Hm.</think>Ok.</think>\n{CALL}", "Hm.", "Ok.</think>", 1),
    ],
)  # fmt: skip
def test_a_call_ends_the_thinking(
    text: str, reasoning: str | None, content: str | None, num_calls: int
) -> None:
    def reader() -> AnswerReader:
        return AnswerReader(
            ThinkParser(OPEN, THINK, ("<tool_call>",)), CallParser(FORMATS["hermes"], {"get_time": None})
        )

    whole = CollectedMessage.from_events(reader().whole(text)).body(with_reasoning=True)
    for body in (whole, *(read(reader(), pieces) for pieces in cuts(text))):
        assert (body["reasoning"], body["content"]) == (reasoning, content)
        calls = [call["function"] for call in body.get("tool_calls", ())]
        assert [call["name"] for call in calls] == ["get_time"] * num_calls
        # An end marker within a call belongs to the call.
        assert all(json.loads(call["arguments"]) in ({}, {"a": "</think>"}) for call in calls)


EARLIER: Final = "<|user|>Think <think>Hm.</think> is how?<|assistant|>"


@pytest.mark.parametrize(
    ("name", "tail", "variables", "at"),
    [
        ("qwen3", "<|im_start|>assistant\n", {}, POSSIBLE),
        ("qwen3", "<|im_start|>assistant\n", {"enable_thinking": True}, POSSIBLE),
        ("qwen3", "<|im_start|>assistant\n<think>\n", {}, OPEN),
        ("qwen3", "<|im_start|>assistant\n<think>\n", {"enable_thinking": False}, OPEN),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", {"enable_thinking": True}, OVER),
        ("qwen3", "what is <think>?<|im_end|>\n<|im_start|>assistant\n", {}, POSSIBLE),
        # Models that think although nothing shows it.
        ("deepseek_r1", "<|Assistant|>", {}, OPEN),
        ("deepseek_r1", "<|Assistant|>", {"enable_thinking": False}, OPEN),
        ("deepseek_r1", "<|Assistant|>", {"reasoning_effort": "none"}, OPEN),
        ("deepseek_r1", "<|Assistant|><think>\n\n</think>\n\n", {}, OVER),
        ("deepseek_r1", EARLIER, {}, OPEN),
        ("deepseek_v3", EARLIER, {}, POSSIBLE),
        ("deepseek_v3", EARLIER, {"thinking": True}, OPEN),
        ("deepseek_v3", EARLIER, {"enable_thinking": True, "thinking": False}, OPEN),
        ("deepseek_v3", EARLIER, {"thinking": False}, POSSIBLE),
        ("deepseek_v4", EARLIER, {}, OPEN),
        ("deepseek_v4", EARLIER, {"thinking": True, "reasoning_effort": "none"}, POSSIBLE),
        ("kimi_k2", "<|im_assistant|>", {}, OPEN),
        ("kimi_k2", "<|im_assistant|>", {"thinking": None}, OPEN),
        ("kimi_k2", "<|im_assistant|>", {"thinking": False}, POSSIBLE),
        ("kimi_k2", "<|im_assistant|><think></think>", {"thinking": True}, OVER),
        ("gemma4", "<|turn>model\n<|channel>thought\n", {}, OPEN),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", {}, OVER),
        ("gemma4", "<|turn>model\n", {"enable_thinking": True}, POSSIBLE),
        ("cohere", "<|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>", {}, OVER),
        ("cohere", "<|CHATBOT_TOKEN|><|START_RESPONSE|>", {}, ANSWER),
        ("hunyuan_a13b", "<think>\n\n</think>\n<answer>\n", {}, ANSWER),
    ],
)  # fmt: skip
def test_where_an_answer_begins(name: str, tail: str, variables: dict[str, Any], at: Thinking) -> None:
    """The end of the prompt decides, then the variables, then the model's habit; older turns do not count."""
    form = THINKING_FORMATS[THINKING_ALIASES.get(name, name)]
    assert thinking_at(form, tail, variables=variables) is at


@pytest.mark.parametrize(
    ("continued", "at"),
    [
        ("<think>\nLet me see,", OPEN),
        ("<think>\nHm.\n</think>\n\nIt is", OVER),
        ("<think>a</think>b<think>c", OPEN),
        ("It is", OVER),
        (" ", POSSIBLE),
    ],
)
def test_an_answer_that_continues_a_turn_begins_where_that_ends(continued: str, at: Thinking) -> None:
    for name in ("qwen3", "deepseek_r1"):
        found = thinking_at(
            THINKING_FORMATS[name], f"assistant\n{continued}", variables={}, continued=continued
        )
        assert found is (OPEN if at is POSSIBLE and name == "deepseek_r1" else at)


@pytest.mark.parametrize(
    ("value", "on"),
    [(True, True), ("enabled", True), ({"type": "enabled"}, True), (False, False), ("disabled", False),
     ({"type": "disabled"}, False), ("False", False), ("off", False)],
)  # fmt: skip
def test_switches_may_be_written_as_in_other_apis(value: object, on: bool) -> None:
    assert THINKING_FORMATS["deepseek_v3"].wanted({"thinking": value}) is on
