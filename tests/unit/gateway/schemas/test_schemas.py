"""Request bodies: accepted values, refused values, bounds, and the wording of refusals."""

import json
from typing import Any

import pytest

from gateway.openai.completions import CompletionRequest
from gateway.operations.tokenize import DetokenizeRequest, TokenizeRequest
from gateway.schemas.base import IgnoredFields, parse, quote
from gateway.schemas.chat import MAX_MESSAGES, MAX_PARTS, ChatCompletionRequest
from protos.errors import InvalidArgument, Unsupported

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse(ChatCompletionRequest, json.dumps({"messages": MESSAGES, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "hi", **fields}).encode())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no body"),
        (b"  ", "no body"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "a",}', "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b'{"prompt": NaN}', "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
    ],
)
def test_a_body_must_be_a_json_object(body: bytes, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        parse(CompletionRequest, body)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", 101), ("temperature", "1"), ("temperature", True), ("temperature", [1]),
        ("top_p", 0), ("top_p", 1.01), ("top_p", -1),
        ("top_k", -2), ("top_k", 1.5), ("top_k", 2**40), ("top_k", "5"),
        ("min_p", -0.1), ("min_p", 1.1),
        ("seed", 2**63), ("seed", 1.5), ("seed", "7"),
        ("frequency_penalty", 2.5), ("presence_penalty", -2.5), ("repetition_penalty", 0), ("repetition_penalty", 11),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2**32), ("max_tokens", 1.5), ("max_tokens", "5"),
        ("min_tokens", -1), ("min_tokens", "5"),
        ("stop", 5), ("stop", [5]), ("stop", [""]), ("stop", ""), ("stop", ["x"] * 17), ("stop", ["x" * 1001]),
        ("stop_token_ids", 5), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", [2**32]),
        ("allowed_token_ids", []), ("allowed_token_ids", [-1]),
        ("logit_bias", {"a": 1}), ("logit_bias", [1]), ("logit_bias", {"-1": 1}),
        ("ignore_eos", 1), ("ignore_eos", "true"), ("skip_special_tokens", 0), ("stream", "yes"),
        ("include_stop_str_in_output", 1), ("priority", 2**31), ("priority", "high"),
        ("cache_salt", ""), ("cache_salt", 5), ("user", 5), ("model", 5), ("stream_options", True),
        ("n", 0), ("logit_bias", {"5": 101}), ("prompt_logprobs", -1), ("prompt_logprobs", 21),
        ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("truncation_side", "middle"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("make", [chat, completion])
def test_a_bad_value_is_refused_by_name(make: Any, name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make(**{name: value, **({"stream": True} if name == "stream_options" else {})})
    assert caught.value.param.partition("[")[0] == name
    assert name in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("make", "name", "neutral", "other"),
    [
        *((make, *row) for make in (chat, completion) for row in (
            ("best_of", 1, 3), ("use_beam_search", False, True),
            ("guided_json", None, {"type": "object"}), ("prompt_embeds", None, "AAAA"),
        )),
        (chat, "functions", [], [{}]), (chat, "function_call", "auto", {"name": "f"}), (chat, "echo", False, True),
        (chat, "modalities", ["text"], ["text", "audio"]), (chat, "web_search_options", None, {}),
        (chat, "return_prompt_text", False, True),
        (completion, "suffix", "", "x"), (completion, "max_completion_tokens", None, 5),
    ],
)  # fmt: skip
def test_unserved_parameters_are_accepted_if_they_change_nothing(
    make: Any, name: str, neutral: Any, other: Any
) -> None:
    """Null and the neutral value pass; other values are refused as unsupported, by name and with a hint."""
    make(**{name: None})
    make(**{name: neutral})
    with pytest.raises(Unsupported, match="is not supported: ") as caught:
        make(**{name: other})
    assert caught.value.param == name


def test_zero_is_not_false() -> None:
    """A neutral false does not accept the number 0, nor the other way round."""
    with pytest.raises(Unsupported):
        chat(use_beam_search=0)
    with pytest.raises(Unsupported):
        chat(return_prompt_text=0)


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "at least 1 item"),
        ("hi", "messages", "valid list"),
        ([5], "messages[0]", "object"),
        ([{"role": "user"}], "messages[0].content", "is required"),
        ([{"content": "x"}], "messages[0].role", "is required"),
        ([{"role": "", "content": "x"}], "messages[0].role", "at least 1 character"),
        ([{"role": "tool", "content": "x"}], "messages[0]", "needs 'tool_call_id'"),
        ([{"role": "function", "content": "x"}], "messages[0].role", "older form"),
        ([{"role": "user", "content": "x", "tool_call_id": "a"}], "messages[0].tool_call_id", "role 'tool'"),
        ([{"role": "user", "content": "x", "reasoning": "a"}], "messages[0].reasoning", "role 'assistant'"),
        ([{"role": "user", "content": None}], "messages[0].content", "is required"),
        ([{"role": "assistant", "content": 0}], "messages[0].content", "string or a list"),
        ([{"role": "user", "content": 5}], "messages[0].content", "string or a list"),
        ([{"role": "user", "content": []}], "messages[0].content", "string or a list"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content", "image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content", "needs 'text'"),
        (
            [*MESSAGES, {"role": "assistant", "content": "x", "tool_calls": [{}]}],
            "messages[1].tool_calls[0].id",
            "is required",
        ),
    ],
)
def test_an_invalid_message_is_refused_by_its_place(messages: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        chat(messages=messages)
    assert caught.value.param == param


def test_messages_are_required() -> None:
    with pytest.raises(InvalidArgument, match="'messages' is required"):
        parse(ChatCompletionRequest, b"{}")


@pytest.mark.parametrize(
    ("turn", "content"),
    [
        ({"content": "x", "refusal": None, "tool_calls": None, "annotations": [], "audio": None, "function_call": None}, "x"),
        ({"content": "x", "annotations": [{"type": "url_citation"}]}, "x"),
        ({"content": None, "refusal": "No."}, "No."), ({"content": "", "refusal": "No."}, "No."),
        ({"content": "x", "refusal": "No."}, "x"), ({"content": None}, ""), ({}, ""), ({"content": []}, ""), ({"content": ""}, ""),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."), ({"content": [{"type": "output_text", "text": "x"}]}, "x"),
        ({"content": None, "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}, ""),
    ],
)  # fmt: skip
def test_an_answers_message_may_come_back(turn: dict[str, Any], content: str) -> None:
    """All shapes of an assistant's turn that clients and vLLM know are accepted in the next request."""
    body = chat(messages=[*MESSAGES, {"role": "assistant", **turn}])
    assert body.messages[1].content == content


def test_names_and_hints_within_messages_are_accepted() -> None:
    """A name reaches the template, which may show it; a hint to a cache is dropped."""
    ignored = IgnoredFields()
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    turn = {"role": "user", "content": [part], "name": "bob"}
    (message,) = parse(ChatCompletionRequest, json.dumps({"messages": [turn]}).encode(), ignored).messages
    assert message.for_template() == {"role": "user", "content": "a", "name": "bob"}
    assert ignored.names == ["content.cache_control", "messages.name"]


def test_a_prompt_ends_in_one_way() -> None:
    """It opens a turn or continues one; the default gives way to a wish."""
    with pytest.raises(InvalidArgument, match="exclude one another"):
        chat(continue_final_message=True, add_generation_prompt=True)
    assert chat(continue_final_message=True).continue_final_message


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ([{"type": "text", "text": "a"}], "a"), (["a"], "a"),
        ([{"type": "text", "text": "a"}, "b"], [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        ([{"type": "input_text", "text": "a", "cache_control": {}}], "a"),
        ([{"type": "text", "text": "a", "lang": "en"}], [{"type": "text", "text": "a", "lang": "en"}]),
        ([{"type": "refusal", "refusal": "a", "text": 5}], "a"),
        ([{"type": "text", "text": "a", "image": "x", "image_url": {}, "input_image": "", "video": 1, "audio": 1}], "a"),
    ],
)  # fmt: skip
def test_parts_are_kept_where_a_template_could_tell_them_from_one_text(content: Any, seen: Any) -> None:
    """Templates of translators read further fields of parts; those of other kinds of parts stay out."""
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    assert parse(ChatCompletionRequest, body).messages[0].for_template()["content"] == seen


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_have_four_shapes(prompt: Any, expected: Any) -> None:
    """A prompt may be a text, texts, token ids, or lists of token ids."""
    assert completion(prompt=prompt).prompt == expected


@pytest.mark.parametrize(
    "prompt", [5, [None], [1, "a"], ["a", 1], [-1], [True], [1.5], [[1], "a"], [[2**32]], {}]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidArgument, match="must be a string") as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("prompt", ["", [], [""], ["a", ""], [[]], [[1], []]])
def test_empty_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidArgument, match="is empty") as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


def test_long_values_are_quoted_in_part() -> None:
    with pytest.raises(InvalidArgument) as caught:
        completion(prompt=[[1] * 10_000, "a"])
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("fields", [{"max_tokens": 3, "min_tokens": 4}, {"min_tokens": 17}])
def test_min_tokens_must_fit(fields: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match="must not exceed") as caught:
        completion(**fields)
    assert caught.value.param == "min_tokens"


def test_stream_options_need_a_stream() -> None:
    with pytest.raises(InvalidArgument, match="stream=true") as caught:
        chat(stream_options={"include_usage": True})
    assert caught.value.param == "stream_options"
    body = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert body.include_usage
    assert body.continuous_usage
    assert not chat(stream=True).include_usage


@pytest.mark.parametrize("fields", [{}, {"prompt": "a", "messages": MESSAGES}])
def test_tokenize_takes_text_or_messages(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="either 'prompt' or 'messages'"):
        parse(TokenizeRequest, json.dumps(fields).encode())


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("name", ["temperature", "stop", "user", "n", "logit_bias"])
def test_deep_nesting_is_refused_like_any_other_value(make: Any, name: str) -> None:
    """The JSON reader accepts 1024 levels; writing the error must not recurse as deep."""
    value: Any = []
    for _ in range(1000):
        value = [value]
    body = b'{"prompt": "hi", "messages": [], "%s": %s1%s}' % (name.encode(), b"[" * 1000, b"]" * 1000)
    with pytest.raises(InvalidArgument):
        parse(CompletionRequest if make is completion else ChatCompletionRequest, body)
    assert quote(value) == "[" * 60 + "…"


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (ChatCompletionRequest, {"messages": MESSAGES}), (CompletionRequest, {"prompt": "a"}),
        (TokenizeRequest, {"prompt": "a"}), (DetokenizeRequest, {"tokens": [1]}),
    ],
)  # fmt: skip
def test_model_names_are_bounded(model: Any, fields: dict[str, Any]) -> None:
    assert parse(model, json.dumps({**fields, "model": "m" * 256}).encode()).model == "m" * 256
    with pytest.raises(InvalidArgument, match="at most 256 characters") as caught:
        parse(model, json.dumps({**fields, "model": "m" * 257}).encode())
    assert caught.value.param == "model"


@pytest.mark.parametrize("model", [ChatCompletionRequest, TokenizeRequest])
def test_the_number_of_messages_is_limited(model: Any) -> None:
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
    fields = {f"x{n}": 1 for n in range(300)}
    with pytest.raises(InvalidArgument, match="the body is an object of 301 fields; send at most 256"):
        chat(**fields)
    with pytest.raises(InvalidArgument, match="is an object of 302 fields") as caught:
        chat(messages=[{**MESSAGES[0], **fields}])
    assert caught.value.param == "messages[0]"
    with pytest.raises(InvalidArgument, match="'logit_bias' takes at most 1024 token ids"):
        chat(logit_bias={str(n): 1000 for n in range(1025)})
