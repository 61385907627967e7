"""vLLM's parsers of thinking, on the same texts as ours. Each difference has its reason."""

import importlib
import sys
import types
from typing import Any, Final

import pytest
from tokenizers import AddedToken, Tokenizer

from gateway.generation.answer_plan import AnswerReader
from gateway.openai.chat import CollectedMessage
from gateway.parsers.reasoning import THINKING_ALIASES, THINKING_FORMATS, Thinking, ThinkParser
from tests.support.gateway.serving import smollm2_folder

pytestmark = pytest.mark.usefixtures("shared_vllm")

# vLLM's parsers of these need libraries that are not installed.
MISSING: Final = {"mistral", "cohere_command3", "cohere_command4"}
# vLLM has no such names; it reads the latter with deepseek_v3.
OURS_ALONE: Final = {"cohere", "deepseek_v31", "deepseek_v32"}

SPECIAL: Final = [
    "<think>", "</think>", "<mm:think>", "</mm:think>", "<seed:think>", "</seed:think>", "<|channel>", "<channel|>",
    "<|open|>", "<|close|>", "<|sep|>", "<response>", "</response>", "<assistant>", "<tool_call>", "</tool_call>",
]  # fmt: skip

# {s} and {e} stand for a format's markers, {a} and {z} for the texts around its answer.
TEXTS: Final = {
    "marked": "{s}Hm.{e}Ok.",
    "lines": "{s}\nHm. So\n{e}\n{a}Ok.{z}",
    "empty": "{s}{e}Ok.",
    "cut": "{s}Hm. It",
    "unmarked": "Hm.{e}Ok.",
    "plain": "Hello big world.",
    "stray": "{e}Ok.",
    "late": "Ok {s}x{e}.",
    "twice": "{s}a{e}b{e}c",
}
NAMES: Final = {*THINKING_FORMATS, *THINKING_ALIASES} - MISSING - OURS_ALONE
ENGINE: Final = {
    "deepseek_v4", "deepseek_v41", "gemma4", "glm45", "glm47", "granite_thinking_parser", "kimi_k2", "ling3", "mimo", "minimax_m2",
    "nemotron_v3", "qwen3", "seed_oss", "step3p5",
}  # fmt: skip

# The names and texts of each difference, by its reason.
DIFFERENCES: Final[dict[str, tuple[set[str], set[str]]]] = {
    "ours reads a start marker at the beginning alone; later, it is text": (
        NAMES - {"hunyuan_a13b", "step3"},
        {"late"},
    ),
    "vLLM drops every further end marker of an answer": (ENGINE, {"twice"}),
    "vLLM takes its prompt to open no thought, yet reads the end of one": ({"gemma4", "olmo3"}, {"unmarked"}),
    "a thought that is cut is thinking": ({"granite", "hunyuan_a13b", "olmo3"}, {"cut"}),
    "ours drops an end marker at the beginning": ({"granite", "hunyuan_a13b"}, {"stray"}),
    "ours also reads Granite 3.3, with <response>": ({"granite"}, {"lines"}),
    "vLLM needs Hunyuan's line breaks and <answer>": ({"hunyuan_a13b"}, {"marked", "empty", "twice"}),
    "vLLM keeps the start marker": ({"step3"}, {"marked", "lines", "empty", "cut", "twice"}),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """SmolLM2's tokenizer with the markers as special tokens."""
    own = Tokenizer.from_file(str(smollm2_folder() / "tokenizer.json"))
    own.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return importlib.import_module("transformers").PreTrainedTokenizerFast(tokenizer_object=own)


@pytest.fixture(autouse=True)
def without_mistral(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces Mistral's parser, which all engine parsers import and whose library is not installed."""
    stand_in = types.ModuleType("vllm.parser.mistral")
    stand_in.MistralParser = type("MistralParser", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.parser.mistral", stand_in)


def theirs(name: str, tokenizer: Any, text: str) -> tuple[str | None, str | None]:
    manager = importlib.import_module("vllm.reasoning").ReasoningParserManager
    protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    request = protocol.ChatCompletionRequest(messages=[{"role": "user", "content": ""}])
    switches = {"thinking": True, "enable_thinking": True}
    parser = manager.get_reasoning_parser(name)(tokenizer, chat_template_kwargs=switches)
    reasoning, content = parser.extract_reasoning(text, request)
    return (reasoning or "").strip() or None, (content or "").strip() or None


def ours(name: str, at: Thinking, text: str) -> tuple[str | None, str | None]:
    reader = AnswerReader(ThinkParser(at, THINKING_FORMATS[THINKING_ALIASES.get(name, name)]), None)
    body = CollectedMessage.from_events(reader.whole(text)).body(with_reasoning=True)
    return (body["reasoning"] or "").strip() or None, (body["content"] or "").strip() or None


@pytest.mark.parametrize("name", sorted(NAMES))
def test_vllm_finds_the_same_thinking(name: str, tokenizer: Any) -> None:
    form = THINKING_FORMATS[THINKING_ALIASES.get(name, name)]
    begin, end = form.answer[0] if form.answer else ("", "")
    # Its parsers assume a prompt with or without a thought; ours are told.
    at = Thinking.OPEN if theirs(name, tokenizer, TEXTS["plain"])[0] else Thinking.POSSIBLE
    different = set()
    for key, pattern in TEXTS.items():
        text = pattern.format(s=form.start, e=form.end, a=begin, z=end)
        if ours(name, at, text) != theirs(name, tokenizer, text):
            different.add(key)
    assert different == {key for names, keys in DIFFERENCES.values() if name in names for key in keys}
