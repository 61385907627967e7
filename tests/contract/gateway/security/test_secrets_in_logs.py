"""No key, token or prompt reaches a log, whatever happens to the request."""

import io
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from pydantic import SecretStr

from gateway.text.tokenization import TextCodec
from protos.errors import Internal, InvalidArgument
from protos.service import logs
from tests.support.gateway.serving import Stack, running_stack

pytestmark = pytest.mark.contract

KEY, ADMIN, FILE_KEY, WRONG = (f"sk-{name}-hush-hush" for name in ("KEY", "ADMIN", "FILE", "WRONG"))
PROMPT = "PROMPT-hush-hush"
ANSWER = "Answer-hush-hush"
HIDDEN = "hush-hush"
"""Every text that no log may have contains it."""

BAD_JSON = b'{"messages": "' + PROMPT.encode()


@pytest.fixture(params=["json", "console"])
def log(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """The log of this process, at debug level."""
    stream, root = io.StringIO(), logging.getLogger()
    before = root.handlers[:], root.level
    monkeypatch.setattr(sys, "stderr", stream)
    logs.configure("gateway", level="debug", log_format=request.param)
    yield stream
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.handlers[:], level = before
    root.setLevel(level)


@pytest.fixture
async def stack(log: io.StringIO, tmp_path: Path) -> AsyncIterator[Stack]:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys: [{{name: file, key: {FILE_KEY}, requests_per_minute: 2}}]")
    given: dict[str, Any] = {
        "api_key": (SecretStr(KEY),),
        "admin_api_key": SecretStr(ADMIN),
        "api_key_file": path,
    }
    async with running_stack(
        ANSWER, max_parked_requests=0, max_body_bytes=10_000, enable_log_requests=True, **given
    ) as stack:
        yield stack


async def test_no_secret_is_logged(
    stack: Stack, log: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers, streams, refusals, faults and files that cannot be read are all logged, without secrets."""
    key = {"Authorization": f"Bearer {KEY}"}
    turns = [{"role": "user", "content": PROMPT}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": turns, "temperature": 0, "metadata": {"a": PROMPT}},
        "/v1/completions": {"prompt": PROMPT, "stop": [PROMPT]},
        "/v1/messages": {"model": "smollm2", "max_tokens": 4, "messages": turns},
        "/v1/responses": {"input": PROMPT},
        "/tokenize": {"prompt": PROMPT},
        "/v1/embeddings": {"input": PROMPT},
        "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/a"},
    }
    everyone: list[dict[str, str]] = [
        key,
        {"x-api-key": FILE_KEY},
        {"Authorization": f"Bearer {ADMIN}"},
        {"Authorization": f"Bearer {WRONG}"},
        {"Authorization": f"Basic {WRONG}"},
        {},
    ]
    statuses = set()
    for path, body in bodies.items():
        for headers in everyone:
            statuses.add((await stack.http.post(path, json=body, headers=headers)).status_code)
        for change in ({"stream": True}, {"n": PROMPT}, {"model": 7}, {"seed": PROMPT}):
            statuses.add((await stack.http.post(path, json=body | change, headers=key)).status_code)
        for content in (BAD_JSON, b'"' + PROMPT.encode() + b'"', PROMPT.encode() * 2000):
            statuses.add((await stack.http.post(path, content=content, headers=key)).status_code)
    await stack.http.get("/v1/models", params={"api_key": WRONG}, headers={"Cookie": WRONG})

    for error in (Internal("broken"), InvalidArgument("no")):
        stack.scheduler.refuse = lambda _, error=error: error  # type: ignore[misc]
        statuses.add(
            (await stack.http.post("/v1/completions", json={"prompt": PROMPT}, headers=key)).status_code
        )
    monkeypatch.setattr(TextCodec, "encode", _fail)
    statuses.add((await stack.http.post("/v1/completions", json={"prompt": PROMPT}, headers=key)).status_code)

    (tmp_path / "keys.yaml").write_text(f"keys: [{{name: file, keys: {FILE_KEY}}}]")
    await stack.http.get("/v1/models", headers=key)

    assert statuses == {200, 400, 401, 403, 413, 429, 500}
    text = log.getvalue()
    for event in ("ttft_ms", "request failed", "unexpected exception", "a bug", "files_not_reloaded"):
        assert event in text
    assert HIDDEN not in text


def _fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("a bug")
