"""vLLM's parser of gpt-oss's messages, as an oracle: the same texts give the same parts."""

from typing import Any

import pytest

from gateway.openai.chat import CollectedMessage
from gateway.parsers.harmony import HarmonyParser

pytestmark = pytest.mark.usefixtures("shared_vllm")

CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
NEXT = "<|end|><|start|>assistant"

TEXTS = {
    "answer": f"<|channel|>analysis<|message|>Hm.{NEXT}<|channel|>final<|message|>Yes.<|return|>",
    "answer alone": "<|channel|>final<|message|>Yes.",
    "call": f'<|channel|>analysis<|message|>Hm.{NEXT}{CALL}{{"a": [1, "<"]}}<|call|>',
    "preamble": f"<|channel|>commentary<|message|>I look.{NEXT}{CALL}{{}}<|call|>",
    "recipient before the channel": " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
    "call in analysis": "<|channel|>analysis to=functions.f code<|message|>{}<|call|>",
    "several thoughts": f"<|channel|>analysis<|message|>A{NEXT}<|channel|>analysis<|message|>B{NEXT}<|channel|>final<|message|>C",
    "several calls": f"{CALL}{{}}<|call|><|start|>assistant{CALL}{{}}<|call|>",
    "built-in tool": "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
    "text alone": "Yes, < and <| too.",
    "no arguments": f"{CALL}<|call|>",
    "cut off": f'{CALL}{{"a": 1',
    "built-in tool in commentary": '<|channel|>commentary to=browser.search code<|message|>{"q": 1}<|call|>',
    "no end": "<|channel|>analysis<|message|>A<|start|>assistant<|channel|>final<|message|>B",
    "no start": "<|channel|>analysis<|message|>A<|end|><|channel|>final<|message|>B",
    "malformed header": f"<|channel|>commentary?<|message|>A{NEXT}<|channel|>final<|message|>B",
    "other role": "<|channel|>final<|message|>A<|end|><|start|>user<|message|>B<|end|>",
    "cut off in a header": "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>fin",
}
DIFFERENCES = {
    "no arguments": "there they are no JSON",
    "built-in tool in commentary": "lost there",
    "no end": "the second message is part of the first there",
    "no start": "the second message is lost there",
    "malformed header": "the message is lost there",
    "other role": "invented turns of the user are content without a mark there",
    "cut off in a header": "the header is content there",
}
"""Why vLLM's reading differs."""


def of_vllm(text: str) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
    from vllm.parser.harmony import HarmonyParser as Theirs
    from vllm.reasoning.gptoss_reasoning_parser import GptOssReasoningParser
    from vllm.tool_parsers.gptoss_tool_parser import GptOssToolParser

    encoding = get_encoding()

    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return str(encoding.decode(ids))

    class Parser(Theirs):  # type: ignore[misc]
        """With the two parsers whose presence alone counts."""

        reasoning_parser = property(lambda _: object.__new__(GptOssReasoningParser), lambda *_: None)
        tool_parser = property(lambda _: object.__new__(GptOssToolParser), lambda *_: None)

    parser = Parser(Tokenizer())
    ids = encoding.encode(text, allowed_special="all")
    reasoning, content, calls = parser.parse(text, None, model_output_token_ids=ids)
    return reasoning, content, [(call.name, call.arguments) for call in calls or ()]


def of_ours(text: str) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    events = HarmonyParser(lambda: "id", {"f"}).whole(text)
    body: Any = CollectedMessage.from_events(events).body(with_reasoning=True)
    calls = [call["function"] for call in body.get("tool_calls", ())]
    return body.get("reasoning"), body["content"], [(call["name"], call["arguments"]) for call in calls]


@pytest.mark.parametrize("name", TEXTS)
def test_the_same_messages(name: str) -> None:
    assert (of_vllm(TEXTS[name]) == of_ours(TEXTS[name])) == (name not in DIFFERENCES)
