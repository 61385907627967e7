"""Settings of the gateway that `vllm serve` has under the same names."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import uvicorn

from gateway.__main__ import HttpServer, listening
from gateway.text.chat_template import read_template
from protos.errors import ConfigurationRefused
from tests.support.gateway.serving import CHAT, TEXT, Stack, running_stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

_TEMPLATE = "{% for message in messages %}<{{ message.content }}>{% endfor %}{{ mood }}{% if enable_thinking %}!{% endif %}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    """Runs a gateway with a template of its own, behind a proxy's path; its model has three names."""
    async with running_stack(
        TEXT,
        aliases=("small", "org/smol"),
        chat_template=_TEMPLATE,
        default_chat_template_kwargs={"mood": "calm", "unknown": 1},
        max_logprobs=2,
        root_path="/llm",
        enable_log_requests=True,
        enable_force_include_usage=True,
    ) as stack:
        yield stack


@pytest.mark.parametrize(
    ("extra", "prompt"),
    [
        ({}, "<hi>calm"),
        ({"chat_template_kwargs": {"mood": "glad"}}, "<hi>glad"),
        ({"reasoning_effort": "high"}, "<hi>calm!"),
    ],
)
async def test_the_deployments_template_and_its_variables(
    stack: Stack, extra: dict[str, Any], prompt: str
) -> None:
    """They replace the model's own; a request's variables come first, and unknown defaults do nothing."""
    answer = await stack.http.post("/v1/chat/completions", json={**CHAT, **extra})
    assert answer.status_code == 200
    text = (await stack.http.post("/tokenize", json={"prompt": prompt})).json()["tokens"]
    assert list(stack.scheduler.requests[0].prompt_token_ids) == text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ("/v1/completions", {"prompt": "x", "logprobs": 3}, "logprobs"),
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": 3}, "prompt_logprobs"),
    ],
)
async def test_more_logprobs_than_allowed_are_refused(
    stack: Stack, path: str, body: dict[str, Any], param: str
) -> None:
    """The error names the parameter and the limit; as many as the limit are fine."""
    refused = await stack.http.post(path, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert "at most 2 log-probabilities" in refused.json()["error"]["message"]
    assert (await stack.http.post(path, json={**body, param: 2})).status_code == 200


async def test_a_proxys_path_may_be_there_or_not(stack: Stack) -> None:
    """Routes answer with and without it, and the API's description names it."""
    for path in ("/v1/models", "/llm/v1/models"):
        assert (await stack.http.get(path)).status_code == 200
    assert (await stack.http.get("/openapi.json")).json()["servers"] == [{"url": "/llm"}]
    for path in ("/v1/messages", "/llm/v1/messages"):
        assert (await stack.http.post(path, content=b"{")).json()["type"] == "error", (
            "errors of this protocol"
        )


async def test_requests_are_logged_without_their_texts(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"prompt": "my secret words", "temperature": 0.5, "max_tokens": 3, "n": 2}
    await stack.http.post("/v1/completions", json=body)
    lines = [line for line in capsys.readouterr().out.splitlines() if "prompt_tokens" in line]
    assert any("temperature" in line and "max_tokens" in line for line in lines)
    assert "secret" not in "".join(lines)


async def test_a_unix_socket_replaces_host_and_port(stack: Stack) -> None:
    """The API answers there; the file goes at the end, and a file of a dead process is in nobody's way."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "http.sock"
        settings = stack.gateway.app.state.context.settings.model_copy(update={"uds": path})
        for _ in range(2):
            with listening(settings) as listeners:
                with (
                    pytest.raises(ConfigurationRefused, match="another process listens there"),
                    listening(settings),
                ):
                    pass
                await _ask(stack, path, listeners)
            assert not path.exists()
        path.mkdir()
        with pytest.raises(ConfigurationRefused, match=r"--uds .*http.sock: "), listening(settings):
            pass


async def _ask(stack: Stack, path: Path, listeners: list[Any]) -> None:
    config = uvicorn.Config(stack.gateway.app, lifespan="off", log_config=None)
    server = HttpServer(config, stack.gateway.client, 0.1)
    serving = asyncio.create_task(server.serve(sockets=listeners))
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=20) as http:
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "smollm2"
    server.should_exit = True
    await serving


async def test_a_template_is_a_file_or_a_text(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(_TEMPLATE)
    assert read_template(str(file)) == read_template(_TEMPLATE) == _TEMPLATE
    assert read_template(None) is None
    for setting, refusal in (
        (str(tmp_path / "none.jinja"), "No such file or directory; give a file or the template's text"),
        ("{% if %}", "--chat-template, line 1: "),
    ):
        with pytest.raises(ConfigurationRefused) as caught:
            read_template(setting)
        assert refusal in str(caught.value)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x", "max_tokens": 3})]
)
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
async def test_usage_can_be_forced_on_streams(
    stack: Stack, path: str, body: dict[str, Any], options: dict[str, Any]
) -> None:
    """Every chunk counts the tokens so far, and the last one has nothing else."""
    *chunks, _ = await stack.stream(path, {**body, **options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], counts[-2])
    assert (await stack.http.post(path, json=body)).status_code == 200


@pytest.mark.parametrize("name", [None, "smollm2", "small", "org/smol"])
async def test_every_name_is_served(stack: Stack, name: str | None) -> None:
    """The scheduler is asked for the model itself, and the answer names it."""
    body = {**CHAT, "model": name} if name else CHAT
    answer = (await stack.http.post("/v1/chat/completions", json=body)).json()
    assert answer["model"] == "smollm2"
    assert [(each.model, each.lora_name) for each in stack.scheduler.requests] == [("smollm2", "")]
    assert (await stack.post("/tokenize", prompt="a", model=name))["count"] == 1


async def test_models_lists_every_name(stack: Stack) -> None:
    """Each name has a card of its own, also alone; other names are unknown."""
    listed = (await stack.http.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["smollm2", "small", "org/smol"]
    assert (await stack.http.get("/v1/models/org/smol")).json() == listed[2]
    assert (await stack.http.get("/v1/models/other")).status_code == 404
