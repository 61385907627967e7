"""Conversations become token ids."""

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from gateway.generation.request_builder import encode_chat
from gateway.scheduler_client.served_model import ServedModel
from gateway.schemas.base import parse
from gateway.schemas.chat import ChatCompletionRequest
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenization import TextCodec, TextWorker
from protos.errors import InvalidArgument
from protos.triptych.v1 import common_pb2 as pb
from tests.support.gateway.serving import smollm2_folder

MODEL = pb.ModelInfo(served_name="smol", vocab_size=49152, max_model_len=64)
SOURCE = "{{ reasoning_effort }}{{ enable_thinking }}{{ documents }}{{ mood }}|{{ messages[0].content }}"


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.load(smollm2_folder())


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[TextWorker]:
    made = TextWorker()
    yield made
    made.close()


async def encoded(
    worker: TextWorker,
    codec: TextCodec,
    size: int = 50,
    **fields: Any,
) -> str:
    """Returns the prompt of a conversation."""
    content = {"messages": [{"role": "user", "content": "hi"}], **fields}
    body = parse(ChatCompletionRequest, json.dumps(content).encode())
    served = ServedModel(MODEL, codec)
    ids = await encode_chat(
        served, worker, body.messages, body, defaults={}, may_call=True, special=False, size=size
    )
    return codec.decode(ids)


def with_template(codec: TextCodec, source: str | None) -> TextCodec:
    """Returns a model's text side with another template."""
    return TextCodec(codec.tokenizer, ChatTemplate(source, {}) if source else None, {})


async def test_a_chat_needs_a_template(worker: TextWorker, codec: TextCodec) -> None:
    """A chat with a base model is refused with the endpoint that works."""
    end = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (await encoded(worker, codec)).endswith(end)
    with pytest.raises(InvalidArgument, match="no chat template; use /v1/completions"):
        await encoded(worker, with_template(codec, None))


async def test_an_answer_is_continued(worker: TextWorker, codec: TextCodec) -> None:
    """The prompt ends within the last turn."""
    turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, "}]
    text = await encoded(worker, codec, messages=turns, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOne, ")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "None|hi"),
        ({"reasoning_effort": "low"}, "lowTrueNone|hi"),
        ({"reasoning_effort": "none"}, "noneFalseNone|hi"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "lowFalseNone|hi"),
        ({"documents": [{"title": "a"}]}, "[{'title': 'a'}]|hi"),
        ({"chat_template_kwargs": {"mood": "bad", "other": 1}}, "Nonebad|hi"),
    ],
)
async def test_parameters_reach_the_template(
    worker: TextWorker, codec: TextCodec, fields: dict[str, Any], text: str
) -> None:
    """A template sees what the client sends, under vLLM's names."""
    assert await encoded(worker, with_template(codec, SOURCE), **fields) == text


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "low"},
        {"documents": [{"a": "b"}]},
        {"chat_template_kwargs": {"mood": 1}},
    ],
)
async def test_parameters_that_the_template_does_not_read(
    worker: TextWorker, codec: TextCodec, fields: dict[str, Any]
) -> None:
    """They change nothing, so they are accepted."""
    plain = with_template(codec, "{{ messages[0].content }}")
    assert await encoded(worker, plain, **fields) == "hi"


async def test_thousands_of_short_messages_leave_the_event_loop(
    worker: TextWorker, codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template's effort grows with the whole body, so a long body is rendered in a thread."""
    threads: list[str] = []

    def render(*_: object, **__: object) -> str:
        threads.append(threading.current_thread().name)
        return "x"

    monkeypatch.setattr(ChatTemplate, "render", render)
    for size in (50, 5000):
        await encoded(worker, codec, size=size)
    assert threads[0] == threading.current_thread().name
    assert threads[1].startswith("text")
