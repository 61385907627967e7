"""Parsers of an installed vLLM, by name."""

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from gateway.__main__ import main
from gateway.generation.answer_plan import AnswerReader, plan_answer
from gateway.openai.chat import CollectedMessage
from gateway.scheduler_client.served_model import ServedModel
from gateway.text.tokenization import TextCodec
from gateway.tools import vllm_parsers
from gateway.tools.formats import FORMATS
from protos.errors import ConfigurationRefused, Unsupported
from protos.triptych.v1 import common_pb2 as pb
from tests.support.gateway.tool_requests import accepts, chat, served_with, settings
from tests.support.gateway.tool_templates import THINKING, TIME, WEATHER, folder_with
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("shared_vllm")

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    special = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>"]
    return TextCodec.load(folder_with(tmp_path_factory.mktemp("qwen"), THINKING, special))


def body_of(reader: AnswerReader, pieces: list[str] | str) -> Any:
    if isinstance(pieces, str):
        return CollectedMessage.from_events(reader.whole(pieces)).body(with_reasoning=True)
    events = [event for piece in pieces for event in reader.feed(piece)]
    return CollectedMessage.from_events([*events, *reader.finish()]).body(with_reasoning=True)


def split_event(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("size", [0, 1, 5])
def test_a_tool_parser_of_vllm(codec: TextCodec, size: int) -> None:
    """Its calls come out like those of the gateway's own parsers, streamed and whole."""
    text = f"Let me look.\n{CALL}\n{CALL}"
    reader = AnswerReader(None, vllm_parsers.tool_parsers("vllm:hermes", codec, [WEATHER, TIME])())
    body = body_of(reader, split_event(text, size) if size else text)
    assert body["content"] == "Let me look."
    assert [call["function"] for call in body["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    ] * 2
    assert len({call["id"] for call in body["tool_calls"]}) == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"Let me look.\n{CALL}\n{CALL}"),
        ("hermes", CALL.removesuffix("\n</tool_call>")),
        ("hermes", "No calls < here <tool_call"),
        ("hermes", "<tool_call>not JSON</tool_call>"),
        ("hermes", '<tool_call>{"name": "get_time"}</tool_call>'),
        ("llama3_json", '{"name": "get_time", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "é"}}'),
        ("llama3_json", '{"name": "get_time", "parameters": {}}, {"name": "get_time", "parameters": {}}'),
        ("llama3_json", '<|python_tag|>{"name": "get_time", "arguments": {"a": [1, {"b": null}]}}'),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": {bad}}</tool_call><tool_call>{"name": "get_time", "arguments": {}}</tool_call>'),
        ("llama3_json", '{"answer": 42}'),
        ("pythonic", "[get_time(), get_weather(city='Paris', days=[1, -2.5, {'x': None}], really=True)]"),
        ("pythonic", "[get_time(1)]"),
        ("pythonic", "It is [1, 2]."),
    ],
)  # fmt: skip
def test_the_gateways_parsers_agree_with_vllms(codec: TextCodec, name: str, text: str) -> None:
    """Whole texts, valid and malformed, have the same calls and the same content."""
    tools = [WEATHER, TIME]
    mine = AnswerReader(None, FORMATS[name].make({"get_weather", "get_time"}))
    other = AnswerReader(None, vllm_parsers.tool_parsers(f"vllm:{name}", codec, tools)())
    assert _meaning(body_of(mine, text)) == _meaning(body_of(other, text))


def _meaning(body: dict[str, Any]) -> tuple[Any, list[tuple[str, Any]]]:
    calls = [call["function"] for call in body.get("tool_calls", [])]
    return body["content"], [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.fixture
def without_mistral(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces Mistral's parser.

    All of vLLM's engine parsers import it, and it needs a library that is not installed.
    """
    stand_in = types.ModuleType("vllm.parser.mistral")
    stand_in.MistralParser = type("MistralParser", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.parser.mistral", stand_in)


@pytest.mark.parametrize("size", [0, 100])
@pytest.mark.usefixtures("without_mistral")
def test_a_parser_of_vllms_engine(codec: TextCodec, size: int) -> None:
    """A format without a parser of the gateway's own can be read."""
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    reader = AnswerReader(None, vllm_parsers.tool_parsers("vllm:qwen3_coder", codec, [WEATHER])())
    (call,) = body_of(reader, split_event(text, size) if size else text)["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert '"Paris"' in call["function"]["arguments"]


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3"])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.usefixtures("without_mistral")
def test_a_reasoning_parser_of_vllm(codec: TextCodec, name: str, streamed: bool) -> None:
    """Thinking and answer are separated; markers come as separate tokens, as from a model."""
    prompt = codec.encode("<|im_start|>assistant\n<think>\n", add_special_tokens=False)
    reader = AnswerReader(vllm_parsers.reasoning_parser(f"vllm:{name}", codec, prompt), None)
    pieces = ["Hm", ".\n", "</think>", "\n\n", "Par", "is."]
    body = body_of(reader, pieces if streamed else "".join(pieces))
    assert (body["reasoning"], body["content"]) == ("Hm.", "Paris.")


@pytest.mark.parametrize(
    ("name", "prompt", "passing", "failing"),
    [
        # It takes everything before the end marker for thinking, so an answer must stand behind one.
        ("deepseek_r1", "<|im_start|>assistant\n", ["Hm.</think>{}", "<think>Hm.</think>\n{}"], ["{}"]),
        ("deepseek_r1", "<think>\n\n</think>\n\n", ["{}"], ["Hm.</think>{}"]),
        ("olmo3", "<|im_start|>assistant\n", ["<think>Hm.</think>{}", "{}"], ["Hm.</think>{}"]),
        ("seed_oss", "<|im_start|>assistant\n", ["Hm.</seed:think>{}"], ["{}", "Hm.</think>{}"]),
        ("openai_gptoss", "<|im_start|>assistant\n", ["{}"], ["Hm.</think>{}"]),
    ],
)
@pytest.mark.usefixtures("without_mistral")
def test_a_constraint_begins_where_the_parser_of_vllm_ends_the_thinking(
    tmp_path: Path, name: str, prompt: str, passing: list[str], failing: list[str]
) -> None:
    """The parser reads as an answer what the grammar accepts as one."""
    special = ["<tool_call>", "<think>", "</think>", "<seed:think>", "</seed:think>"]
    served = served_with(folder_with(tmp_path, THINKING, special))
    ids = served.text.encode(prompt, add_special_tokens=False)
    plan = plan_answer(
        settings(reasoning_parser=f"vllm:{name}"), served, chat(structured_outputs={"regex": "[{][}]"}), ids
    )
    assert plan.constraint is not None
    for text in passing:
        assert _accepted(plan.constraint, text)
        assert "".join(CollectedMessage.from_events(plan.reader().whole(text)).content).strip() == "{}"
    for text in failing:
        assert not _accepted(plan.constraint, text)
    calls = plan_answer(
        settings(reasoning_parser=f"vllm:{name}"), served, chat(tools=[TIME], tool_choice="required"), ids
    )
    assert calls.constraint is not None
    for text in passing:
        assert accepts(
            calls.constraint,
            text.replace("{}", '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'),
        )


def _accepted(constraint: Any, text: str) -> bool:
    if constraint.WhichOneof("spec") == "regex":
        return text == "{}"
    return accepts(constraint, text)


def test_a_parser_of_vllm_without_markers_allows_no_constraint(codec: TextCodec) -> None:
    """Without markers the beginning of the answer is unknown; unconstrained answers still work."""
    served = ServedModel(pb.ModelInfo(served_name="m"), codec)
    chosen = settings(reasoning_parser="vllm:granite")
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TIME], "tool_choice": "required"}, "tools"),
    ]
    for body, param in bodies:
        with pytest.raises(Unsupported, match="--reasoning-parser vllm:granite") as caught:
            plan_answer(chosen, served, chat(**body), [1])
        assert caught.value.param == param
    assert plan_answer(chosen, served, chat(), [1]).constraint is None


def test_unknown_parsers_end_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, known in (("--tool-call-parser", "hermes"), ("--reasoning-parser", "deepseek_r1")):
        assert main([flag, "vllm:nothing"]) == 2
        (printed,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("{")]
        assert f"{flag} vllm:nothing: vLLM has no such parser" in printed
        assert known in printed


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install and where."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))
    with pytest.raises(ConfigurationRefused, match="vLLM is not installed in the gateway's environment"):
        vllm_parsers.check("--tool-call-parser", "vllm:hermes")
    vllm_parsers.check("--tool-call-parser", "hermes")


def test_only_three_places_import_vllm() -> None:
    """Only the worker's adapter, the command that runs vLLM's bench and this module import vLLM."""
    root = ROOT
    importing = {
        "worker_svc/vllm_adapter" if "vllm_adapter" in path.parts else str(path.relative_to(root))
        for package in ("gateway", "scheduler_svc", "worker_svc", "deploy", "protos")
        for path in (root / package).rglob("*.py")
        if any(
            line.strip().startswith(("import vllm", "from vllm")) or 'import_module("vllm' in line
            for line in path.read_text().splitlines()
        )
    }
    assert importing == {
        "deploy/commands/bench.py", "gateway/tools/vllm_parsers.py", "worker_svc/vllm_adapter",
    }  # fmt: skip
