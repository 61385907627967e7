"""Bounds of request bodies: their names, and how many messages and fields they have."""

import json
from typing import Any

import pytest

from gateway.openai.completions import CompletionRequest
from gateway.operations.tokenize import DetokenizeRequest, TokenizeRequest
from gateway.schemas.base import parse
from gateway.schemas.chat import MAX_MESSAGES, MAX_PARTS, ChatCompletionRequest
from protos.errors import InvalidArgument

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse(ChatCompletionRequest, json.dumps({"messages": MESSAGES, **fields}).encode())


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (ChatCompletionRequest, {"messages": MESSAGES}), (CompletionRequest, {"prompt": "a"}),
        (TokenizeRequest, {"prompt": "a"}), (DetokenizeRequest, {"tokens": [1]}),
    ],
)  # fmt: skip
def test_model_names_are_bounded(model: Any, fields: dict[str, Any]) -> None:
    """Model names go into every line of the access log."""
    assert parse(model, json.dumps({**fields, "model": "m" * 256}).encode()).model == "m" * 256
    with pytest.raises(InvalidArgument, match="at most 256 characters") as caught:
        parse(model, json.dumps({**fields, "model": "m" * 257}).encode())
    assert caught.value.param == "model"


@pytest.mark.parametrize("model", [ChatCompletionRequest, TokenizeRequest])
def test_the_number_of_messages_is_limited(model: Any) -> None:
    """The number of messages is checked before the messages themselves."""
    taken = parse(model, json.dumps({"messages": MESSAGES * MAX_MESSAGES}).encode())
    assert len(taken.messages) == MAX_MESSAGES
    with pytest.raises(InvalidArgument, match=f"takes at most {MAX_MESSAGES} messages, got 5000") as caught:
        parse(model, json.dumps({"messages": [{}] * 5000}).encode())
    assert caught.value.param == "messages"


@pytest.mark.parametrize("model", [ChatCompletionRequest, TokenizeRequest])
def test_the_number_of_parts_is_limited(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All messages of a request share the limit, which is checked before any part is read."""
    half = {"role": "user", "content": [""] * (MAX_PARTS // 2)}
    assert len(parse(model, json.dumps({"messages": [half, half]}).encode()).messages) == 2
    monkeypatch.setattr("gateway.schemas.chat._part", lambda *_: pytest.fail("read"))
    with pytest.raises(InvalidArgument, match=f"takes at most {MAX_PARTS} parts of messages, got") as caught:
        parse(model, json.dumps({"messages": [half, half, {"role": "user", "content": ["a"]}]}).encode())
    assert caught.value.param == "messages"


def test_the_number_of_fields_is_limited() -> None:
    """Hundreds of fields are refused at once, not one by one."""
    fields = {f"x{n}": 1 for n in range(300)}
    with pytest.raises(InvalidArgument, match="the body is an object of 301 fields; send at most 256"):
        chat(**fields)
    with pytest.raises(InvalidArgument, match="is an object of 302 fields") as caught:
        chat(messages=[{**MESSAGES[0], **fields}])
    assert caught.value.param == "messages[0]"
    with pytest.raises(InvalidArgument, match="'logit_bias' takes at most 1024 token ids"):
        chat(logit_bias={str(n): 1000 for n in range(1025)})
