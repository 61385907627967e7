"""How streamed answers are read and printed, whatever server sends them."""

import json
from typing import Any

import httpx
import pytest

from deploy.client.answers import Answer, print_answer
from deploy.client.connection import ClientError, Connection, first_model

SERVER = Connection("http://server")


def client_of(*lines: str, status: int = 200) -> httpx.Client:
    """Returns a client whose server answers with these lines."""
    content = "".join(f"{line}\n\n" for line in lines)
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text=content))
    return httpx.Client(base_url=SERVER.url, transport=transport)


def answer_of(*lines: str) -> Answer:
    with client_of(*lines) as client:
        return print_answer(client, SERVER, "/v1/chat/completions", {}, stats=False)


def delta(**fields: Any) -> str:
    return f"data: {json.dumps({'choices': [{'delta': fields}]})}"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_thinking_is_shown_apart(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is in vLLM's tags, whichever name it has, and not in the answer that a conversation keeps."""
    lines = [
        delta(role="assistant", content=""),
        ": keep-alive",
        delta(**{field: "Hm"}),
        delta(**{field: "m."}),
    ]
    answer = answer_of(*lines, delta(content="Pa"), delta(content="ris"), "data: [DONE]")
    assert capsys.readouterr().out == "<think>\nHmm.\n</think>\nParis\n"
    assert answer.text == "Paris"


def test_thinking_without_an_answer_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """The tag is closed although no text follows."""
    assert answer_of(delta(reasoning="Hm"), "data: [DONE]").text == ""
    assert capsys.readouterr().out == "<think>\nHm\n</think>\n"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('data: {"error": {"message": "the worker\\n is lost"}}', "the worker is lost"),
        ('data: {"error": "lost"}', "lost"),
        ("data: {", "an event that is not JSON: {"),
        ("data: 3", "an event that is not an object: 3"),
    ],
)
def test_an_event_that_is_no_chunk_is_an_error(line: str, error: str) -> None:
    """What the server sends in the middle of a stream reads as one line."""
    with pytest.raises(ClientError, match=error):
        answer_of(delta(content="Pa"), line)


def test_any_server_s_refusal_is_one_line() -> None:
    """Its body may have OpenAI's form, another one, or none."""
    for content, message in [
        ('{"error": {"message": "no\\nway"}}', "no way"),
        ('{"message": "no way"}', "no way"),
        ("<html>no</html>", "<html>no</html>"),
        ("", "without a message"),
        ("[]", r"\[\]"),
    ]:
        with client_of(content, status=500) as client, pytest.raises(ClientError, match=f"500: {message}$"):
            first_model(client, SERVER)


def test_a_server_without_models_asks_for_a_name() -> None:
    """No model is chosen where none is listed."""
    with (
        client_of('{"object": "list", "data": []}') as client,
        pytest.raises(ClientError, match="name one with --model-name"),
    ):
        first_model(client, SERVER)
