"""Parsers of an installed vLLM, by name."""

import importlib.util
import sys
import types
from typing import Any

import pytest

from gateway.generation.answer_plan import AnswerReader
from gateway.openai.chat import CollectedMessage
from gateway.text.tokenization import TextCodec
from gateway.tools import vllm_parsers
from protos.errors import ConfigurationRefused
from tests.support.gateway.tool_templates import THINKING, folder_with
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
