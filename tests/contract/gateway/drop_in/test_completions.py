"""Habits of vLLM's clients: plain completions, tokens and their ids, and fields without effect."""

from typing import Any

import pytest
from openai import AsyncOpenAI
from structlog.testing import capture_logs

from tests.support.gateway.serving import CHAT, TEXT, Stack, smollm2_folder, tokenizer_of

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

HABITS: dict[str, Any] = {
    "logit_bias": {"5": -100}, "user": "me", "suffix": None, "best_of": 2, "n": 2, "stop": ["never"], "seed": 1,
    "temperature": 2.5,
}  # fmt: skip
# Of vLLM's fields, those that change nothing here.
VLLM_HABITS = {
    "stream_interval": 4,
    "session_id": "s",
    "thinking_token_budget": -1,
    "return_token_offsets": True,
}

PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": ["The capital", "A"], "max_tokens": 5}}
# Parsed for thinking, so that text and tokens come apart.
THINKING = {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}


@pytest.mark.parametrize("prompt", [["The capital", "A cat"], [[5, 6], [7, 8]]])
@pytest.mark.parametrize("streamed", [False, True])
async def test_several_prompts_with_all_of_the_clients_habits(
    stack: Stack, prompt: Any, streamed: bool
) -> None:
    """Choices are numbered prompt by prompt and begin with their own prompts, streamed or not."""
    tokenizer = tokenizer_of(smollm2_folder())
    given = [text if isinstance(text, str) else tokenizer.decode(text) for text in prompt]
    texts, logprobs = dict.fromkeys(range(4), ""), dict.fromkeys(range(4), 0)
    async with AsyncOpenAI(base_url=f"{stack.gateway.base_url}/v1", api_key="unused") as client:
        answer: Any = await client.completions.create(
            model="smollm2", prompt=prompt, max_tokens=3, echo=True, logprobs=1, stream=streamed,
            extra_body=VLLM_HABITS, **HABITS,
        )  # fmt: skip
        for choice in [one async for part in answer for one in part.choices] if streamed else answer.choices:
            texts[choice.index] += choice.text
            logprobs[choice.index] += len(choice.logprobs.tokens) if choice.logprobs else 0
    counts = [len(tokenizer.encode(text).ids) if isinstance(text, str) else len(text) for text in prompt]
    for choice, text in texts.items():
        assert text.startswith(given[choice // 2])
        assert len(text) > len(given[choice // 2])
        assert logprobs[choice] == counts[choice // 2] + 3


async def test_tokens_are_counted_spelled_and_read_back(stack: Stack) -> None:
    """For texts and for conversations; ids beyond the vocabulary are refused, not dropped."""
    for body in ({"prompt": "The capital"}, CHAT, {**CHAT, "add_generation_prompt": False}):
        answer = await stack.post("/tokenize", **body, return_token_strs=True)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == 512
        text = (await stack.post("/detokenize", tokens=answer["tokens"]))["prompt"]
        again = await stack.post("/tokenize", prompt=text, add_special_tokens=False)
        assert again == {**answer, "token_strs": None}
    status, error = await stack.refusal("/detokenize", tokens=[5, 10**6])
    assert (status, error["param"]) == (400, "tokens")


@pytest.mark.parametrize("path", PATHS)
async def test_collected_answers_have_token_ids(stack: Stack, path: str) -> None:
    """Each choice has its own; a chat has its prompt's once, a completion in each choice."""
    body = {**PATHS[path], "n": 2, "return_token_ids": True}
    answer = (await stack.http.post(path, json=body)).json()
    prompts = [list(request.prompt_token_ids) for request in stack.scheduler.requests]
    for choice in answer["choices"]:
        prompt, sequence = prompts[choice["index"] // 2], choice["index"] % 2
        assert (choice if path == "/v1/completions" else answer)["prompt_token_ids"] == prompt
        expected = stack.scheduler.reply[sequence:]
        assert choice["token_ids"] == expected[: len(choice["token_ids"])]
    assert (
        sum(len(choice["token_ids"]) for choice in answer["choices"]) == answer["usage"]["completion_tokens"]
    )


@pytest.mark.parametrize(
    ("path", "body"), [*PATHS.items(), ("/v1/chat/completions", THINKING)], ids=["chat", "text", "parsed"]
)
@pytest.mark.parametrize("more", [{}, {"stop": ["zzz"]}, {"logprobs": 1}])
async def test_streams_have_token_ids(
    stack: Stack, path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    """The first chunk has the prompt's, and the chunks together those of the answer."""
    if "chat" in path and "logprobs" in more:
        more = {"logprobs": True}
    *chunks, _ = await stack.stream(path, {**body, **more, "return_token_ids": True})
    found: dict[int, list[int]] = {}
    first: dict[int, list[int]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        found.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
        if ids := {**chunk, **choice}.get("prompt_token_ids"):
            first[choice["index"]] = ids
    requests = stack.scheduler.requests
    assert first == {index: list(request.prompt_token_ids) for index, request in enumerate(requests)}
    assert all(ids == stack.scheduler.reply[: len(ids)] and ids for ids in found.values())


CHATS = "/v1/chat/completions"
NO_EFFECT = {"metadata": {"a": "b"}, "store": True, "service_tier": "flex", "unheard_of": [1]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, CHAT), ("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"}),
        ("/tokenize", CHAT), ("/detokenize", {"tokens": [5]}),
    ],
)  # fmt: skip
async def test_one_debug_line_names_the_fields_without_effect(
    stack: Stack, path: str, body: dict[str, Any]
) -> None:
    plain = (await stack.http.post(path, json=body)).json()
    with capture_logs() as logs:
        answer = await stack.http.post(path, json={**body, **NO_EFFECT})
    lines = [line["fields"] for line in logs if line["event"] == "the request has fields without effect"]
    assert (answer.status_code, lines) == (200, [list(NO_EFFECT)])
    assert answer.json().get("choices") == plain.get("choices")


async def test_the_example_of_structured_output_is_accepted(stack: Stack) -> None:
    """vLLM-RBLN's example has a schema of unknown keywords alone, which says nothing."""
    schema = {"sentiment": "str", "score": "float"}
    answer = await stack.http.post(CHATS, json={**CHAT, "structured_outputs": {"json": schema}})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "ipython", "content": "hi"}],
        [{"role": "user", "content": ["hi", {"type": "text", "text": "there", "lang": "en"}]}],
        [*CHAT["messages"], {"role": "tool", "tool_call_id": "a", "content": None}],
        [{"role": "user", "content": "hi", "extra_field": "0"}],
    ],
)
async def test_odd_messages_are_served(stack: Stack, messages: Any) -> None:
    answer = await stack.http.post(CHATS, json={"messages": messages, "max_tokens": 20.0})
    assert answer.json()["choices"][0]["message"]["content"] == TEXT


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, CHAT),
        ("/tokenize", CHAT),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {**CHAT, "max_tokens": 5}),
        ("/v1/embeddings", CHAT),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
async def test_a_template_of_the_client_is_refused_by_name(
    stack: Stack, path: str, body: dict[str, Any]
) -> None:
    answer = await stack.http.post(path, json={**body, "chat_template": "{{ messages }}"})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert "chat_template" in message
    assert "--chat-template" in message
