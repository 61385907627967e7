"""Parsers of an installed vLLM, by name."""

import importlib.util
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
from protos.errors import ConfigurationRefused, Unsupported
from protos.triptych.v1 import common_pb2 as pb
from tests.support.gateway.tool_requests import accepts, chat, served_with, settings
from tests.support.gateway.tool_templates import THINKING, TIME, folder_with
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


@pytest.fixture
def without_mistral(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces Mistral's parser.

    All of vLLM's engine parsers import it, and it needs a library that is not installed.
    """
    stand_in = types.ModuleType("vllm.parser.mistral")
    stand_in.MistralParser = type("MistralParser", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.parser.mistral", stand_in)


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
    assert main(["--reasoning-parser", "vllm:nothing"]) == 2
    (printed,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("{")]
    assert "--reasoning-parser vllm:nothing: vLLM has no such parser" in printed
    assert "deepseek_r1" in printed


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install and where."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))
    with pytest.raises(ConfigurationRefused, match="vLLM is not installed in the gateway's environment"):
        vllm_parsers.check("--reasoning-parser", "vllm:qwen3")
    vllm_parsers.check("--reasoning-parser", "qwen3")


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
