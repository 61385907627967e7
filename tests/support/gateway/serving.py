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
from gateway.http.listeners import listen
from gateway.scheduler_client.client import InferenceClient
from gateway.scheduler_client.startup_queue import StartupQueue
from gateway.settings import Settings
from tests.support.gateway.fake_scheduler import FakeScheduler, serving
from worker_svc.model_files import demo_models as models

# What the fake scheduler answers in most tests, and a conversation to send.
TEXT = "Paris is the capital of France. It lies on the Seine."
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@functools.cache
def smollm2_folder() -> Path:
    """Returns a folder with SmolLM2's tokenizer files and nothing else, as a scheduler sends them."""
    source = models.fetch("smollm2")
    folder = tempfile.TemporaryDirectory(prefix="triptych-test-")
    atexit.register(folder.cleanup)
    for name in FILES:
        shutil.copy(source / name, folder.name)
    return Path(folder.name)


@functools.cache
def minilm_folder() -> Path:
    """Returns a folder with MiniLM's tokenizer, which joins pairs as BERT does, and with prompts."""
    source = models.fetch("minilm")
    folder = tempfile.TemporaryDirectory(prefix="triptych-test-")
    atexit.register(folder.cleanup)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder.name)
    prompts = {"prompts": {"query": "ask: ", "document": "tell: "}, "default_prompt_name": "document"}
    (Path(folder.name) / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return Path(folder.name)


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
        tokenizer = Tokenizer.from_file(str(self.scheduler.folder / "tokenizer.json"))
        self.scheduler.reply = [*tokenizer.encode(text, add_special_tokens=False).ids, 2]

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
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    scheduler = FakeScheduler(folder, [*tokenizer.encode(text).ids, 2], aliases=aliases)
    scheduler.vocab_size = max(scheduler.vocab_size, tokenizer.get_vocab_size())
    async with (
        serving(scheduler) as server,
        running_gateway(server.port, **changes) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url, timeout=20) as http,
    ):
        yield Stack(scheduler, gateway, http)


@contextlib.asynccontextmanager
async def running_gateway(
    scheduler_port: int, *, wait: bool = True, **changes: Any
) -> AsyncIterator[Gateway]:
    """Runs a real gateway on a free port; by default waits until it knows its model."""
    settings = Settings.model_construct(
        **{
            **{name: field.default for name, field in Settings.model_fields.items()},
            "port": 0,
            "scheduler_address": f"127.0.0.1:{scheduler_port}",
            "drain_timeout_s": 0.2,
            **changes,
        }
    )
    client = InferenceClient(
        settings.scheduler_address,
        resume_timeout_s=settings.resume_timeout_s,
        call_timeout_s=settings.call_timeout_s,
        startup_queue=StartupQueue(settings.max_parked_requests, settings.park_timeout_s),
    )
    app = create_app(settings, client)
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = HttpServer(http_config(settings, app), client, settings.drain_timeout_s)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(10):
            while not server.started or (wait and not app.state.context.watcher.model_name):
                await asyncio.sleep(0.01)
        yield Gateway(f"http://127.0.0.1:{port}", port, client, app)
    finally:
        server.should_exit = True
        await task
