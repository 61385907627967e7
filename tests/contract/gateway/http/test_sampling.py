"""Choices, log-probabilities and sampling parameters over HTTP and gRPC, against a fake scheduler."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from gateway.generation.sequence_text import Prompt, Reporter
from tests.support.gateway.serving import CHAT, Stack, running_stack, smollm2_folder, tokenizer_of

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

PATH = "/v1/completions"
TEXT = "Paris is the capital of 日本 🇫🇷 too."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    async with running_stack(TEXT) as stack:
        yield stack


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of(smollm2_folder())


def texts(stack: Stack, tokenizer: Tokenizer, n: int) -> list[str]:
    """Returns the fake scheduler's text for each of n choices."""
    return [tokenizer.decode(stack.scheduler.reply[sequence:-1]) for sequence in range(n)]


async def test_choices_are_numbered_prompt_by_prompt(stack: Stack, tokenizer: Tokenizer) -> None:
    """Two prompts with three choices each are two requests; the usage counts each prompt once."""
    answer = await stack.post(PATH, prompt=["a b", "c"], n=3, max_tokens=99)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == 2 * texts(stack, tokenizer, 3)
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    assert [request.n for request in stack.scheduler.requests] == [3, 3]
    length = len(stack.scheduler.reply)
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 2 * (length + length - 1 + length - 2)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}


async def test_choices_of_a_chat(stack: Stack, tokenizer: Tokenizer) -> None:
    """Each choice of a stream opens with its role and ends once, with the same text as a collected one."""
    answer = await stack.post("/v1/chat/completions", **CHAT, n=2)
    assert [one["message"]["content"] for one in answer["choices"]] == texts(stack, tokenizer, 2)
    chunks = await stack.stream("/v1/chat/completions", {**CHAT, "n": 2})
    streamed, ends = ["", ""], []
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["delta"].get("content") or ""
        if choice["finish_reason"]:
            ends.append(choice["index"])
    assert streamed == texts(stack, tokenizer, 2)
    assert sorted(ends) == [0, 1]
    roles = [chunk["choices"][0]["index"] for chunk in chunks[:-1] if "role" in chunk["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1]


async def test_a_stop_string_ends_one_choice(stack: Stack, tokenizer: Tokenizer) -> None:
    """Only the first choice contains the stop string, so only it is aborted at the scheduler."""
    # The first choice has ended by then, and no other one.
    stack.scheduler.pause_after = 3
    answering = asyncio.create_task(stack.post(PATH, prompt="x", n=3, max_tokens=99, stop=["Paris"]))
    await stack.scheduler.until(lambda: bool(stack.scheduler.aborted))
    await stack.scheduler.resume()
    answer = await answering
    assert [one["finish_reason"] for one in answer["choices"]] == ["stop", "stop", "stop"]
    assert [one["stop_reason"] for one in answer["choices"]] == ["Paris", None, None]
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][2]["text"] == texts(stack, tokenizer, 3)[2]
    (aborted,) = stack.scheduler.aborted
    assert aborted == f"{stack.scheduler.requests[0].request_id}#0"


async def test_choices_survive_a_broken_stream(stack: Stack, tokenizer: Tokenizer) -> None:
    stack.scheduler.break_after = len(stack.scheduler.reply) - 2
    answer = await stack.post(PATH, prompt="x", n=4, max_tokens=99, logprobs=0, stop=["Paris"])
    assert [one["text"] for one in answer["choices"]] == ["", *texts(stack, tokenizer, 4)[1:]]
    for sequence, choice in enumerate(answer["choices"][1:], start=1):
        assert len(choice["logprobs"]["tokens"]) == len(stack.scheduler.reply) - sequence
    resumed = stack.scheduler.requests[-1]
    assert resumed.n == 4
    parts = {part.sequence: part for part in resumed.resumed}
    assert parts[0].finished
    assert list(parts[1].token_ids) == stack.scheduler.reply[1 : 1 + len(parts[1].token_ids)]
    assert len(parts[1].token_ids) > 3


async def test_logprobs_of_a_completion(stack: Stack, tokenizer: Tokenizer) -> None:
    reply = stack.scheduler.reply
    answer = await stack.post(PATH, prompt="x", logprobs=1, max_tokens=99)
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    assert set(found) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    # The end token counts and is reported, but has no text in the answer.
    assert len(found["tokens"]) == len(reply) == answer["usage"]["completion_tokens"]
    assert found["tokens"][-1] == "<|im_end|>"
    assert found["token_logprobs"] == [-1.0 - position for position in range(len(reply))]
    likeliest = tokenizer.decode([7], skip_special_tokens=False)
    assert found["top_logprobs"][0] == {found["tokens"][0]: -1.0, likeliest: -0.25}
    for token, offset in list(zip(found["tokens"], found["text_offset"], strict=True))[:-1]:
        if "\ufffd" not in token:
            assert choice["text"][offset : offset + len(token)] == token
    # A part of a character has the character's offset.
    parts = [found["text_offset"][i] for i, token in enumerate(found["tokens"]) if "\ufffd" in token]
    assert parts
    assert {choice["text"][offset] for offset in parts} <= set("日本 🇫🇷")


async def test_logprobs_are_streamed_as_they_are_collected(stack: Stack) -> None:
    """Streamed columns equal the collected ones, even if text is held back for a stop string."""
    for stop in ([], ["capital of nothing"]):
        body: dict[str, Any] = {"prompt": "x", "logprobs": 2, "max_tokens": 99, "stop": stop}
        whole = (await stack.post(PATH, **body))["choices"][0]
        chunks = [chunk["choices"][0] for chunk in (await stack.stream("/v1/completions", body))[:-1]]
        assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
        for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            streamed = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"][column]]
            assert streamed == whole["logprobs"][column]


async def test_logprobs_of_a_chat(stack: Stack, tokenizer: Tokenizer) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    answer = await stack.post("/v1/chat/completions", **body)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == len(stack.scheduler.reply)
    assert set(content[0]) == {"token", "logprob", "bytes", "top_logprobs"}
    assert bytes(byte for entry in content[:-1] for byte in entry["bytes"]).decode() == TEXT
    assert any("\ufffd" in entry["token"] for entry in content)
    assert [one["logprob"] for one in content[3]["top_logprobs"]] == [-0.25, -4.0]
    assert content[3]["top_logprobs"][1] == {key: content[3][key] for key in ("token", "logprob", "bytes")}
    chunks = (await stack.stream("/v1/chat/completions", body))[:-1]
    streamed = [
        entry
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == content
    bare = await stack.post("/v1/chat/completions", **CHAT, logprobs=True)
    assert {len(entry["top_logprobs"]) for entry in bare["choices"][0]["logprobs"]["content"]} == {0}
    assert stack.scheduler.requests[-1].sampling.HasField("logprobs")
    assert stack.scheduler.requests[-1].sampling.logprobs == 0


async def test_tokens_may_be_written_as_ids(stack: Stack) -> None:
    answer = await stack.post(PATH, prompt="x", logprobs=1, max_tokens=2, return_tokens_as_token_ids=True)
    found = answer["choices"][0]["logprobs"]
    assert found["tokens"] == [f"token_id:{token}" for token in stack.scheduler.reply[:2]]
    assert found["top_logprobs"][0] == {found["tokens"][0]: -1.0, "token_id:7": -0.25}


async def test_prompt_logprobs(stack: Stack, tokenizer: Tokenizer) -> None:
    """Prompt log-probabilities have vLLM's shape: by id, with rank and text, and null for the first token."""
    prompt = tokenizer.encode("The capital of France").ids
    answer = await stack.post(PATH, prompt=[prompt, [5]], n=2, max_tokens=1, prompt_logprobs=1)
    found = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert found[0] == found[1]
    assert found[2] == found[3] == [None]
    assert found[0][0] is None
    assert len(found[0]) == len(prompt)
    for position, entry in enumerate(found[0][1:], start=1):
        own, top = str(prompt[position]), "7"
        assert entry[own] == {
            "logprob": -1.0 - position, "rank": 2, "decoded_token": tokenizer.decode([prompt[position]]),
        }  # fmt: skip
        assert entry[top]["rank"] == 1
        assert set(entry) == {own, top}
    chat = await stack.post("/v1/chat/completions", **CHAT, max_tokens=1, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert {len(entry) for entry in chat["prompt_logprobs"][1:]} == {1}
    status, error = await stack.refusal(PATH, prompt="x", prompt_logprobs=1, stream=True)
    assert (status, error["param"]) == (400, "prompt_logprobs")


async def test_echo(stack: Stack, tokenizer: Tokenizer) -> None:
    """Each answer begins with its prompt, given as text or ids."""
    prompt = "The capital of France"
    ids = tokenizer.encode(prompt).ids
    plain = await stack.post(PATH, prompt=[prompt, "hm"], max_tokens=2)
    answer = await stack.post(PATH, prompt=[prompt, "hm"], max_tokens=2, echo=True)
    for given, one, echoed in zip([prompt, "hm"], plain["choices"], answer["choices"], strict=True):
        assert echoed["text"] == given + one["text"]
    assert answer["usage"] == plain["usage"]
    body: dict[str, Any] = {"prompt": ids, "max_tokens": 2, "echo": True, "logprobs": 1}
    whole = (await stack.post(PATH, **body))["choices"][0]
    assert whole["text"] == prompt + plain["choices"][0]["text"]
    found = whole["logprobs"]
    assert found["tokens"] == [tokenizer.decode([token]) for token in [*ids, *stack.scheduler.reply[:2]]]
    assert found["token_logprobs"] == [None, *(-1.0 - n for n in range(1, len(ids))), -1.0, -2.0]
    assert found["top_logprobs"][0] is None
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert whole["text"][offset : offset + len(token)] == token
    chunks = [chunk["choices"][0] for chunk in (await stack.stream("/v1/completions", body))[:-1]]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [t for chunk in chunks if chunk["logprobs"] for t in chunk["logprobs"]["tokens"]] == found[
        "tokens"
    ]


async def test_a_prompt_alone_is_scored(stack: Stack, tokenizer: Tokenizer) -> None:
    """With max_tokens=0 and echo, generated tokens are neither shown nor counted."""
    prompt = "The capital of France"
    answer = await stack.post(PATH, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer["choices"]
    assert choice["text"] == prompt
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(tokenizer.encode(prompt).ids)
    assert answer["usage"]["completion_tokens"] == 0
    status, error = await stack.refusal(PATH, prompt="x", max_tokens=0)
    assert (status, error["param"]) == (400, "max_tokens")


async def test_bad_words_become_sequences_of_tokens(stack: Stack, tokenizer: Tokenizer) -> None:
    """With and without a leading space; a single choice needs no number."""
    await stack.post(PATH, prompt="x", max_tokens=2, bad_words=["Paris", " of France"])
    request = stack.scheduler.requests[-1]
    assert [list(word.token_ids) for word in request.sampling.bad_words] == [
        tokenizer.encode(text).ids for text in ("Paris", " Paris", "of France", " of France")
    ]
    assert not request.HasField("n")


@pytest.mark.parametrize(
    ("keep", "side", "kept"),
    [(3, None, slice(-3, None)), (3, "left", slice(-3, None)), (3, "right", slice(0, 3)), (500, None, slice(None)),
     (-1, None, slice(-510, None)), (-1, "right", slice(0, 510))],
)  # fmt: skip
async def test_truncation(stack: Stack, keep: int, side: str | None, kept: slice) -> None:
    """The last tokens stay, or the first; -1 leaves room for the answer in a context of 512."""
    prompt = list(range(10, 610)) if keep == -1 else list(range(10, 60))
    await stack.post(PATH, prompt=prompt, max_tokens=2, truncate_prompt_tokens=keep, truncation_side=side)
    assert list(stack.scheduler.requests[-1].prompt_token_ids) == prompt[kept]


async def test_truncation_of_a_chat_and_of_an_echo(stack: Stack, tokenizer: Tokenizer) -> None:
    """A template's tokens are cut like any others, and the echo omits the removed ones."""
    await stack.post("/v1/chat/completions", **CHAT, max_tokens=1, truncate_prompt_tokens=2)
    assert len(stack.scheduler.requests[-1].prompt_token_ids) == 2
    answer = await stack.post(
        PATH, prompt="The capital of France", max_tokens=0, echo=True, truncate_prompt_tokens=2
    )
    assert answer["choices"][0]["text"] == " of France"


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"n": 10**9}, "n"),
    ({"prompt": ["a"] * 100, "n": 2}, "n"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"stop": ["x"] * 100_000}, "stop"),
    ({"stop": ["x" * 1_000_000]}, "stop"),
    ({"bad_words": ["x"] * 100_000}, "bad_words"),
    ({"bad_words": ["x" * 1_000_000]}, "bad_words"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"logit_bias": {str(n): 1 for n in range(100_000)}}, "logit_bias"),
    ({"logit_bias": {"9" * 5_000: 1}}, "logit_bias"),
    ({"allowed_token_ids": [1] * 2_000_000}, "allowed_token_ids"),
    ({"stop_token_ids": [1] * 2_000_000}, "stop_token_ids"),
    ({"truncate_prompt_tokens": 10**9}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 512}, "truncate_prompt_tokens"),
]


async def test_hostile_parameters_are_refused_fast_and_by_name(stack: Stack) -> None:
    """A refusal is one line, costs little more than a valid request, and does not delay others."""
    large: dict[str, Any] = {
        "prompt": "x",
        "user": "u",
        "cache_salt": "s",
        "logit_bias": {str(n): 1 for n in range(1000)},
    }
    began = time.process_time()
    await stack.post(PATH, **large)
    honest = time.process_time() - began
    for changes, param in HOSTILE:
        body = json.dumps({"prompt": "x", **changes})
        beside = asyncio.create_task(stack.post(PATH, prompt="x"))
        began = time.process_time()
        response = await stack.http.post("/v1/completions", content=body)
        took = time.process_time() - began
        error = response.json()["error"]
        assert (response.status_code, error["param"].partition("[")[0]) == (400, param), error
        assert "\n" not in error["message"]
        assert len(error["message"]) < 300
        assert took < 50 * honest + 0.5, (param, took, honest)
        assert (await beside)["choices"][0]["text"]


async def test_top_logprobs_need_logprobs(stack: Stack) -> None:
    for body in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}):
        status, error = await stack.refusal("/v1/chat/completions", **CHAT, **body)
        assert (status, error["param"]) == (400, "top_logprobs")


SCORED: dict[str, Any] = {"prompt": "The capital of France", "max_tokens": 3, "n": 2}
ECHOED = {**SCORED, "echo": True, "logprobs": 2}


async def choices(stack: Stack, body: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await stack.post(PATH, **body))["choices"]
    return found


async def streamed(stack: Stack, body: dict[str, Any]) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = [("", []), ("", [])]
    for event in (await stack.stream(PATH, body))[:-1]:
        (choice,) = event["choices"]
        text, tokens = found[choice["index"]]
        reported = choice["logprobs"]["tokens"] if choice["logprobs"] else []
        found[choice["index"]] = (text + choice["text"], tokens + reported)
    return found


@pytest.mark.parametrize("others_first", [False, True])
@pytest.mark.parametrize("break_in_prompt", [False, True])
@pytest.mark.parametrize("size", [1, 2])
async def test_parts_add_up(stack: Stack, size: int, break_in_prompt: bool, others_first: bool) -> None:
    """The answer is the same however the prompt's log-probabilities arrive."""
    scored = {**SCORED, "prompt_logprobs": 1}
    whole = [await choices(stack, scored), await choices(stack, ECHOED)]
    stream = await streamed(stack, ECHOED)
    stack.scheduler.prompt_logprobs_per_event, stack.scheduler.others_first = size, others_first
    for body, expected in zip((scored, ECHOED), whole, strict=True):
        stack.scheduler.break_in_prompt = break_in_prompt
        assert await choices(stack, body) == expected
    stack.scheduler.break_in_prompt = break_in_prompt
    assert await streamed(stack, ECHOED) == stream
    assert stream == [(choice["text"], choice["logprobs"]["tokens"]) for choice in whole[1]]


async def test_long_prompts_are_encoded_in_a_thread(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []

    def note(kind: type, name: str) -> None:
        function = getattr(kind, name)

        def noted(self: Any, *args: Any) -> Any:
            if name != "completion" or len(args[0]) > 100:
                calls.append((name, threading.current_thread().name))
            return function(self, *args)

        monkeypatch.setattr(kind, name, noted)

    note(Prompt, "report")
    note(Reporter, "prompt")
    note(Reporter, "completion")
    long = {"prompt": list(range(100, 500)), "max_tokens": 2, "n": 2, "logprobs": 5}
    found = await choices(stack, {**long, "prompt_logprobs": 5, "echo": True})
    assert [len(choice["prompt_logprobs"]) for choice in found] == [400, 400]
    await stack.stream(PATH, {**long, "echo": True})
    assert Counter(name for name, _ in calls) == {"report": 2, "prompt": 1, "completion": 4}
    assert all(thread.startswith("text") for _, thread in calls)
