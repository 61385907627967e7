"""No body, refused or accepted, stops the event loop for long."""

import asyncio
import gc
import json
import shutil
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import pytest

from protos.triptych.v1 import common_pb2 as pb
from tests.support.gateway.fake_scheduler import FakeScheduler
from tests.support.gateway.serving import (
    CHAT,
    TEXT,
    Stack,
    minilm_folder,
    running_stack,
    smollm2_folder,
    stack_over,
)

pytestmark = pytest.mark.contract

BODY_BYTES: Final = 8 * 1024 * 1024

# CPU time between two turns of the loop, seconds: other processes of a busy machine do not count.
# Of all threads, because one that holds the interpreter's lock stops the loop, too: five times the aim of the
# bench of hostile clients, a tenth of what these bodies once took. Of the loop's own thread: twice the aim.
LONGEST_S: Final = 0.25
LONGEST_OF_LOOP_S: Final = 0.1

MESSAGES: Final = '"messages":[{"role":"user","content":"hi"}],"max_tokens":1'
FORMAT: Final = '"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"anyOf":['

# Path, what precedes and follows the items, an item, and how many of them are just about accepted.
ITEMS: Final = {
    "prompts": ("/v1/completions", '{"prompt":[', "[1]", "]}", 90_000),
    "token-ids": ("/v1/completions", '{"prompt":[', "49000", "]}", 490_000),
    "allowed": ("/v1/completions", '{"prompt":"a","allowed_token_ids":[', "[1]", "]}", 90_000),
    "biases": ("/v1/completions", '{"prompt":"a","logit_bias":{', '"%d":1', "}}", 90_000),
    "stops": ("/v1/completions", '{"prompt":"a","stop":[', '"a"', "]}", 90_000),
    "unknown": ("/v1/completions", '{"prompt":"a","x":[', "[1]", "]}", 90_000),
    "fields": ("/v1/completions", '{"prompt":"a",', '"%d":1', "}", 90_000),
    "format": ("/v1/completions", f'{{"prompt":"a",{FORMAT}', '{"type":"object"}', "]}}}}", 40_000),
    "format-lists": ("/v1/chat/completions", f"{{{MESSAGES},{FORMAT}", "[1]", "]}}}}", 90_000),
    "kwargs": ("/v1/chat/completions", f'{{{MESSAGES},"chat_template_kwargs":{{"x":[', "[1]", "]}}", 90_000),
    "tools": ("/v1/chat/completions", f'{{{MESSAGES},"tools":[', '{"type":"function"}', "]}", 40_000),
    "parts": (
        "/v1/chat/completions",
        '{"max_tokens":1,"messages":[{"role":"user","content":[',
        '{"type":"text","text":""}',
        "]}]}",
        16_000,
    ),
    "part": (
        "/v1/chat/completions",
        '{"max_tokens":1,"messages":[{"role":"user","content":[{"type":"text","text":"",',
        '"%d":1',
        "}]}]}",
        90_000,
    ),
    "blocks": (
        "/v1/messages",
        '{"max_tokens":1,"messages":[{"role":"user","content":[',
        '{"type":"text","text":"a"}',
        "]}]}",
        16_000,
    ),
    "input": (
        "/v1/messages",
        '{"max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"a","input":{"x":[',
        "[1]",
        "]}}]}]}",
        90_000,
    ),
    "items": (
        "/v1/responses",
        '{"max_output_tokens":1,"input":[',
        '{"role":"user","content":""}',
        "]}",
        4000,
    ),
    "results": ("/v1/responses", '{"input":[{"type":"x_call","results":[', "{}", "]}]}", 90_000),
    "tokens": ("/detokenize", '{"tokens":[', "49000", "]}", 490_000),
    "tokens-lists": ("/detokenize", '{"tokens":[', "[1]", "]}", 90_000),
}
POOLED: Final = {
    "inputs": ("/v1/embeddings", '{"input":[', "[1]", "]}", 90_000),
    "input-ids": ("/v1/embeddings", '{"input":[', "1", "]}", 490_000),
    "texts": ("/score", '{"text_1":"a","text_2":[', '"a"', "]}", 90_000),
    "documents": ("/rerank", '{"query":"a","documents":[', '{"text":"a"}', "]}", 60_000),
}


def body_of(before: str, item: str, after: str, count: int) -> bytes:
    """Returns a body of so many items, or as many as fit into it."""
    count = min(count, (BODY_BYTES - len(before) - len(after)) // (len(item) + 1))
    if "%d" in item:
        items = ",".join(item % index for index in range(min(count, 600_000)))
    else:
        items = ",".join([item] * count)
    return f"{before}{items}{after}".encode()


def post(port: int, path: str, body: bytes) -> int:
    """Posts a body; returns the status of the answer once it is complete. Runs in a thread."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=100) as connection:
        connection.sendall(head.encode())
        connection.sendall(body)
        answer = connection.recv(1 << 20)
        while connection.recv(1 << 20):
            pass
    return int(answer.split()[1])


async def longest_turn(stop: asyncio.Event) -> float:
    """Returns the most CPU time between two turns of the event loop, seconds; asserts the loop's own."""
    longest, own, before, own_before = 0.0, 0.0, time.process_time(), time.thread_time()
    while not stop.is_set():
        await asyncio.sleep(0.002)
        now, own_now = time.process_time(), time.thread_time()
        longest, own = max(longest, now - before), max(own, own_now - own_before)
        before, own_before = now, own_now
    assert own < LONGEST_OF_LOOP_S
    return longest


async def attack(stack: Stack, path: str, body: bytes) -> tuple[int, float]:
    """Posts a body; returns the status, and the longest turn of the event loop meanwhile."""
    stop = asyncio.Event()
    watch = asyncio.create_task(longest_turn(stop))
    try:
        status = await asyncio.to_thread(post, stack.gateway.port, path, body)
    finally:
        stop.set()
    return status, await watch


@pytest.fixture(autouse=True)
def _as_in_a_gateway() -> Iterator[None]:
    """Keeps the tests' own modules out of collections of garbage, as a gateway does."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(TEXT) as stack:
        yield stack


@pytest.fixture
async def pooling() -> AsyncIterator[Stack]:
    scheduler = FakeScheduler(
        minilm_folder(), model="minilm", max_model_len=64, pooled_size=4, pool_tasks=[pb.POOL_TASK_EMBED]
    )
    async with stack_over(scheduler) as stack:
        yield stack


QUICK: Final = ("prompts", "unknown", "fields")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ITEMS]
)
async def test_bodies_of_many_items(stack: Stack, name: str) -> None:
    """As many as are read, and as many as fit into a body: those are refused by the kind of item."""
    path, before, item, after, count = ITEMS[name]
    for number, statuses in ((count, (200, 400)), (10**9, (400,))):
        status, longest = await attack(stack, path, body_of(before, item, after, number))
        assert status in statuses
        assert longest < LONGEST_S


@pytest.mark.slow
@pytest.mark.parametrize("name", POOLED)
async def test_many_inputs_of_a_pooling_model(pooling: Stack, name: str) -> None:
    path, before, item, after, count = POOLED[name]
    for number in (count, 10**9):
        status, longest = await attack(pooling, path, body_of(before, item, after, number))
        assert status == 400
        assert longest < LONGEST_S


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", "/v1/chat/completions", "/v1/messages"])
async def test_a_text_of_many_tokens(stack: Stack, path: str) -> None:
    for count, expected in ((450_000, 200 if path == "/tokenize" else 400), (3_000_000, 400)):
        text = "1" * count
        chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        asked = {"prompt": text, "return_token_strs": True} if path == "/tokenize" else {"prompt": text}
        body = chat if path in ("/v1/chat/completions", "/v1/messages") else asked
        status, longest = await attack(stack, path, json.dumps(body).encode())
        assert status == expected
        assert longest < LONGEST_S


@pytest.mark.parametrize("text", ["[{,", r"\"", r"\\", r"\n"])
async def test_signs_within_a_text_are_not_items(stack: Stack, text: str) -> None:
    """A text is not refused for its brackets, commas, quotes and backslashes."""
    body = f'{{"max_tokens":1,"truncate_prompt_tokens":5,"prompt":"{text * 200_000}"}}'
    status, longest = await attack(stack, "/v1/completions", body.encode())
    assert status == 200
    assert longest < LONGEST_S


async def test_lists_in_the_arguments_of_earlier_calls(stack: Stack) -> None:
    """They are JSON within JSON, counted over all calls of a conversation."""
    arguments = f'{{"x":[{",".join(["[1]"] * 60_000)}]}}'
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    for count, words in ((1, "maximum context length"), (30, "100000 lists and objects")):
        turn = {"role": "assistant", "content": "", "tool_calls": [call] * count}
        body = json.dumps({"messages": [*CHAT["messages"], turn]}).encode()
        watch = asyncio.create_task(attack(stack, "/v1/chat/completions", body))
        response = await stack.http.post("/v1/chat/completions", content=body)
        assert response.status_code == 400
        assert words in response.text
        status, longest = await watch
        assert status == 400
        assert longest < LONGEST_S


async def test_parameters_that_each_prompt_copies(stack: Stack) -> None:
    """Lists that a single prompt may have are too long for a hundred prompts."""
    token_ids = list(range(100, 49_100)) * 8
    for prompts, expected in ((1, 200), (100, 400)):
        body = {"prompt": ["a"] * prompts, "max_tokens": 1, "allowed_token_ids": token_ids}
        status, longest = await attack(stack, "/v1/completions", json.dumps(body).encode())
        assert status == expected
        assert longest < LONGEST_S


LOOPS: Final = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ends", ["never", pytest.param("sometimes", marks=pytest.mark.slow)])
async def test_a_template_without_end(tmp_path: Path, ends: str) -> None:
    """It is interrupted: chats get 400 with the reason, other requests are served meanwhile."""
    folder = shutil.copytree(smollm2_folder(), tmp_path / "model")
    template = LOOPS if ends == "never" else f"{{% if messages|length > 1 or tools %}}{LOOPS}{{% endif %}}hi"
    (folder / "chat_template.jinja").write_text(template)
    async with running_stack(TEXT, folder=folder) as stack:
        chat = CHAT if ends == "never" else {"messages": CHAT["messages"] * 2}
        stop = asyncio.Event()
        watch = asyncio.create_task(longest_turn(stop))
        refused = asyncio.create_task(stack.refusal("/v1/chat/completions", **chat))
        assert (await stack.http.get("/live")).status_code == 200
        assert TEXT in (await stack.http.post("/v1/completions", json={"prompt": "a"})).text
        assert not refused.done()
        status, error = await refused
        assert status == 400
        assert "chat template takes more than" in error["message"]
        stop.set()
        assert await watch < LONGEST_S
        if ends == "sometimes":
            assert (await stack.http.post("/v1/chat/completions", json=CHAT)).status_code == 200
