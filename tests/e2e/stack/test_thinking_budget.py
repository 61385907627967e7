"""Budgets of thinking on a real stack, in all three APIs: each token of a text of single bytes counts."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.campaign.processes import tiny_chat_model
from tests.support.campaign.processes.tiny_chat_model import FIRST_BYTE, PRINTABLE
from tests.support.stack import Stack, running_stack

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.timeout(240)]

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning %}<think>\n{{ m.reasoning }}\n</think>\n\n{% endif %}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
)
CLOSE = [FIRST_BYTE + byte for byte in b"\n</think>\n\n"]
USER = [{"role": "user", "content": "Why?"}]
# Letters alone, so that texts have as many characters as tokens, and the model writes no markers.
LETTERS = [token for token in PRINTABLE if chr(token - FIRST_BYTE).isalpha()]
ASK: dict[str, Any] = {
    "messages": USER, "temperature": 1.0, "seed": 5, "max_tokens": 60, "allowed_token_ids": LETTERS,
    "return_token_ids": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A tiny model whose chat template opens the thinking."""
    folder = tiny_chat_model.write(tmp_path_factory.mktemp("model"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    flags = ("--dtype", "float32", "--max-model-len", "512", "--reasoning-effort-budgets", '{"low": 12}')
    with running_stack(folder, "tiny", tmp_path_factory.mktemp("stack"), *flags) as stack:
        yield stack


def post(stack: Stack, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{stack.base_url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(stack: Stack, **fields: Any) -> tuple[list[int], dict[str, Any]]:
    """Returns the tokens and the message of a chat."""
    (choice,) = post(stack, "/v1/chat/completions", **{**ASK, **fields})["choices"]
    return choice["token_ids"], choice["message"]


def test_the_end_comes_after_the_budget(stack: Stack) -> None:
    """The thought is that of a request without a budget, cut; the answer follows it."""
    free, _ = chat(stack)
    for tokens in (0, 1, 12, 40):
        found, message = chat(stack, thinking_token_budget=tokens)
        assert found[:tokens] == free[:tokens]
        assert found[tokens : tokens + len(CLOSE)] == CLOSE
        assert len(found) == len(free) == 60
        assert (message["reasoning"] or "") == "".join(chr(token - FIRST_BYTE) for token in free[:tokens])
        assert len(message["content"] or "") == 60 - tokens - len(CLOSE)
    assert chat(stack, reasoning_effort="low")[0] == chat(stack, thinking_token_budget=12)[0]


def test_the_apis_agree(stack: Stack) -> None:
    """The same thought and the same answer, streamed too."""
    common = {"temperature": 0, "max_tokens": 40}
    _, message = chat(stack, **common, seed=None, allowed_token_ids=None, thinking_token_budget=12)
    thought, text = message["reasoning"], message["content"]
    response = post(
        stack, "/v1/responses", input="Why?", temperature=0, max_output_tokens=40, reasoning={"effort": "low"}
    )
    items = {item["type"]: item["content"][0]["text"] for item in response["output"]}
    assert (items["reasoning"], items["message"]) == (thought, text)
    budget = {"type": "enabled", "budget_tokens": 12}
    blocks = post(stack, "/v1/messages", messages=USER, **common, thinking=budget)["content"]
    assert [block.get("thinking") or block.get("text") for block in blocks] == [thought, text]


def test_an_answer_after_it_keeps_its_form(stack: Stack) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for fields in ({}, {"top_k": 20}, {"temperature": 0}):
        found, message = chat(
            stack, response_format=form, allowed_token_ids=None, thinking_token_budget=9, **fields
        )
        assert json.loads(message["content"])["a"] in (1, 2)
        # A byte of a longer character may come first: its other bytes follow.
        assert bytes(token - FIRST_BYTE for token in found[9:24]).find(b"\n</think>") in range(4)


def lost_workers(stack: Stack) -> float:
    lines = httpx.get(f"{stack.base_url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("triptych:lost_workers_total{"))


def test_a_lost_worker_changes_nothing(stack: Stack) -> None:
    long = {**ASK, "thinking_token_budget": 200, "max_tokens": 400}
    expected, _ = chat(stack, **long)
    pid, found, lost = stack.pid("worker-0"), list[int](), lost_workers(stack)
    body = {**long, "stream": True}
    with httpx.stream("POST", f"{stack.base_url}/v1/chat/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                found += choice.get("token_ids") or []
            if len(found) >= 20 and pid:
                os.kill(pid, signal.SIGKILL)
                pid = 0
    assert found == expected
    assert lost_workers(stack) == lost + 1
