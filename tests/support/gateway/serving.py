"""Gateways that listen, and SmolLM2's tokenizer files, for tests of the gateway."""

import asyncio
import atexit
import contextlib
import functools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from gateway.__main__ import HttpServer, http_config
from gateway.app import create_app
from gateway.http.listeners import ServerTls, listen
from gateway.scheduler_client.client import InferenceClient
from gateway.scheduler_client.in_flight import StartupQueue
from gateway.settings import Settings
from protos.service.channels import PLAIN, LinkSecurity
from tests.support.gateway.fake_scheduler import FakeScheduler, serving
from worker_svc.model_files import loader as models

# What the fake scheduler answers in most tests, and a conversation to send.
TEXT = "Paris is the capital of France. It lies on the Seine."
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def _folder_of(model: str, files: Sequence[str]) -> Path:
    """Returns a folder with copies of some files of a demo model."""
    folder = tempfile.TemporaryDirectory(prefix="triptych-test-")
    atexit.register(folder.cleanup)
    for name in files:
        shutil.copy(models.fetch(model) / name, folder.name)
    return Path(folder.name)


@functools.cache
def smollm2_folder() -> Path:
    """Returns a folder with SmolLM2's tokenizer files and nothing else, as a scheduler sends them."""
    return _folder_of("smollm2", FILES)


@functools.cache
def minilm_folder() -> Path:
    """Returns a folder with MiniLM's tokenizer, which joins pairs as BERT does, and with prompts."""
    folder = _folder_of("minilm", FILES[:2])
    prompts = {"prompts": {"query": "ask: ", "document": "tell: "}, "default_prompt_name": "document"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


@functools.cache
def tokenizer_of(folder: Path) -> Tokenizer:
    """Returns the tokenizer of a folder, which neither pads nor truncates."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@dataclass
class Gateway:
    """A gateway that listens in this process."""

    base_url: str
    port: int
    client: InferenceClient
    app: Any


@dataclass
class Stack:
    """A gateway, its fake scheduler, and an HTTP client."""

    scheduler: FakeScheduler
    gateway: Gateway
    http: httpx.AsyncClient

    def reply_with(self, text: str) -> None:
        """Makes ``text`` the answer to every request."""
        tokenizer = tokenizer_of(self.scheduler.folder)
        self.scheduler.reply = [*tokenizer.encode(text, add_special_tokens=False).ids, 2]

    @property
    def prompt(self) -> str:
        """The text of the last request's prompt, with special tokens."""
        token_ids = list(self.scheduler.requests[-1].prompt_token_ids)
        return str(tokenizer_of(self.scheduler.folder).decode(token_ids, skip_special_tokens=False))

    async def post(self, path: str, **body: Any) -> Any:
        """Posts ``body`` and returns the answer's object."""
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def refusal(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Posts ``body`` and returns the status and the error."""
        response = await self.http.post(path, json=body)
        return response.status_code, response.json()["error"]

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Posts ``body`` and returns the objects of the event stream; the last one is the text "[DONE]"."""
        found: list[Any] = []
        async with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            async for line in response.aiter_lines():
                if line:
                    assert line.startswith("data: ")
                    data = line.removeprefix("data: ")
                    found.append(data if data == "[DONE]" else json.loads(data))
        return found


@contextlib.asynccontextmanager
async def running_stack(
    text: str, *, folder: Path | None = None, aliases: Sequence[str] = (), **changes: Any
) -> AsyncIterator[Stack]:
    """Runs a gateway whose scheduler answers everything with ``text``.

    The tokenizer files are SmolLM2's, or those in ``folder``. ``aliases`` are further names of the model, and
    ``changes`` are settings of the gateway.
    """
    folder = folder or smollm2_folder()
    tokenizer = tokenizer_of(folder)
    scheduler = FakeScheduler(folder, [*tokenizer.encode(text).ids, 2], aliases=aliases)
    scheduler.vocab_size = max(scheduler.vocab_size, tokenizer.get_vocab_size())
    async with stack_over(scheduler, **changes) as stack:
        yield stack


@contextlib.asynccontextmanager
async def stack_over(scheduler: FakeScheduler, **changes: Any) -> AsyncIterator[Stack]:
    """Runs a gateway over a fake scheduler; ``changes`` are settings of the gateway."""
    async with (
        serving(scheduler) as server,
        running_gateway(server.port, **changes) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url, timeout=20) as http,
    ):
        yield Stack(scheduler, gateway, http)


@contextlib.asynccontextmanager
async def running_gateway(
    scheduler_port: int, *, wait: bool = True, security: LinkSecurity = PLAIN, **changes: Any
) -> AsyncIterator[Gateway]:
    """Runs a real gateway on a free port; by default waits until it knows its model."""
    settings = Settings.model_construct(
        **{
            **{name: field.default for name, field in Settings.model_fields.items()},
            "port": 0,
            "scheduler_address": f"127.0.0.1:{scheduler_port}",
            "drain_s": 0.2,
            **changes,
        }
    )
    client = InferenceClient(
        settings.scheduler_address,
        resume_timeout_s=settings.resume_timeout_s,
        call_timeout_s=settings.call_timeout_s,
        startup_queue=StartupQueue(settings.max_parked_requests, settings.park_timeout_s),
        security=security,
    )
    tls = ServerTls.from_settings(settings)
    app = create_app(settings, client)
    app.state.context.metrics.certificates.expiries += [tls.expiries] if tls else []
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = HttpServer(http_config(settings, app, tls), client, settings.drain_s)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(10):
            while not server.started or (wait and not app.state.context.watcher.model_name):
                await asyncio.sleep(0.01)
        yield Gateway(f"http://127.0.0.1:{port}", port, client, app)
    finally:
        server.should_exit = True
        await task
