"""vLLM's tool parsers, as an oracle: the same texts give the same calls."""

import importlib
import json
import sys
import types
from typing import Any

import pytest

from gateway.generation.answer_plan import AnswerReader
from gateway.openai.chat import CollectedMessage
from gateway.parsers.formats import FORMATS
from gateway.parsers.machine import CallParser
from gateway.parsers.writing import Call, write
from tests.support.gateway.tool_templates import folder_with

pytestmark = pytest.mark.usefixtures("shared_vllm", "without_mistral")

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "wind": {"type": "boolean"},
        "places": {"type": "array", "items": {"type": "string"}},
        "options": {"type": "object", "properties": {"unit": {"type": "string"}}},
    },
}
TOOLS: dict[str, Any] = {"get_weather": SCHEMA, "get_time": {"type": "object", "properties": {}}}
PARIS = Call("get_weather", {"city": "Paris"})
ALL = Call(
    "get_weather",
    {"city": "São Paulo <5 & more>", "days": 5, "wind": True, "places": ["a", "b"], "options": {"unit": "C"}},
)
FIVE = Call("get_weather", {"city": "5"})
NOW = Call("get_time", {})
ANSWERS = {
    "one": ("", [PARIS]),
    "text": ("Let me look.\n", [PARIS]),
    "types": ("", [ALL]),
    "digits": ("", [FIVE]),
    "nothing": ("", [NOW]),
    "several": ("", [PARIS, NOW, ALL]),
}

NAMES = {
    "hunyuan": "hunyuan_a13b", "phi4_mini": "phi4_mini_json", "cohere": "", "granite": "granite", "mistral": "",
    "mistral_v11": "", "mistral_v13": "",
}  # fmt: skip
"""vLLM's names where they differ; empty: its parser needs a package that is not installed."""

_FIRST_BRACKET = "the list ends at the first bracket there, even within a value"
DIFFERENCES = {
    ("phi4_mini", "types"): _FIRST_BRACKET,
    ("phi4_mini", "several"): _FIRST_BRACKET,
    ("internlm", "several"): "a second call is an error there",
    ("llama4_pythonic", "text"): "calls after text are content there",
}
"""By format and answer: why vLLM's calls differ from those that were written."""


@pytest.fixture
def without_mistral(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces Mistral's parser: all of vLLM's engine parsers import it, and it needs mistral-common."""
    stand_in = types.ModuleType("vllm.parser.mistral")
    stand_in.MistralParser = type("MistralParser", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.parser.mistral", stand_in)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer with the markers of all formats, as vLLM wraps it."""
    marks = {
        mark
        for form in FORMATS.values()
        for text in form.texts()
        for mark in text.split("\n")
        if mark.startswith("<") and mark.endswith(">") and " " not in mark
    }
    folder = folder_with(
        tmp_path_factory.mktemp("marks"), special_tokens=sorted(marks | {"<think>", "</think>"})
    )
    transformers = importlib.import_module("transformers")
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return importlib.import_module("vllm.tokenizers.hf").get_cached_tokenizer(wrapped)


def request(tools: Any) -> Any:
    protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    written = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in tools.items()
    ]
    return protocol.ChatCompletionRequest(messages=[{"role": "user", "content": ""}], tools=written)


def of_vllm(name: str, tokenizer: Any, text: str) -> list[tuple[str, Any]]:
    manager = importlib.import_module("vllm.tool_parsers").ToolParserManager
    asked = request(TOOLS)
    parser = manager.get_tool_parser(NAMES.get(name, name))(tokenizer, asked.tools)
    found = parser.extract_tool_calls(text, asked)
    return [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]


def of_ours(name: str, text: str) -> list[tuple[str, Any]]:
    events = AnswerReader(None, CallParser(FORMATS[name], TOOLS)).whole(text)
    body = CollectedMessage.from_events(events).body(with_reasoning=False)
    calls = [call["function"] for call in body.get("tool_calls", [])]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("name", FORMATS)
def test_the_same_calls(name: str, kind: str, tokenizer: Any) -> None:
    """Ours are those written; vLLM's are the same, or a listed difference."""
    before, calls = ANSWERS[kind]
    if before and not FORMATS[name].trigger:
        # Without a marker, an answer that has begun as text stays text.
        assert of_ours(name, before + write(FORMATS[name], calls)) == []
        return
    text = before + write(FORMATS[name], calls)
    expected = [(call.name, call.arguments) for call in calls]
    assert of_ours(name, text) == expected
    if NAMES.get(name, name):
        try:
            same = of_vllm(name, tokenizer, text) == expected
        except ValueError:
            same = False
        assert same == ((name, kind) not in DIFFERENCES)
