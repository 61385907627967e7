"""Renders chat templates that clients send.

Such a template may loop, or write gigabytes, while it is compiled or rendered. So both happen in a process
that the kernel ends beyond its CPU time and memory. It has no secrets in its environment, and opens no files.
"""

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from gateway.chat_prompts.chat_input import ChatInput, ChatPrompt
from protos.errors import InvalidArgument, Overloaded

CPU_S: Final = 2.0
"""CPU seconds that a template may take."""
MEMORY_BYTES: Final = 256 << 20
"""Bytes that its process may allocate."""
MAX_TEXT: Final = 8 << 20
"""Characters of a prompt."""

# Templates that are rendered at a time, and those that wait.
_PROCESSES: Final = 2
_MAX_WAITING: Final = 64
# A process may have to wait for a core.
_WALL_S: Final = 30.0
_PARAM: Final = "chat_template"
# A child needs these to find its modules; the rest may be secret.
_PASSED: Final = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")


def job_of(source: str, special_tokens: Mapping[str, str], chat: ChatInput) -> bytes:
    """Returns a job for the sandbox.

    Args:
        source: the client's template.
        special_tokens: the model's.
        chat: the conversation.
    """
    job = {"source": source, "special_tokens": dict(special_tokens), "chat": asdict(chat)}
    return json.dumps(job).encode()


class TemplateSandbox:
    """Processes that render templates, each one template at a time."""

    def __init__(self) -> None:
        self._idle: list[Process] = []
        self._busy: set[Process] = set()
        self._free = asyncio.Semaphore(_PROCESSES)
        self._num_waiting = 0

    async def write(self, job: bytes) -> ChatPrompt:
        """Returns the prompt that a client's template writes; ``job`` is of :func:`job_of`.

        Raises:
            InvalidArgument: if the template is invalid, refuses the conversation or takes too much.
            Overloaded: if too many templates wait.
        """
        if self._num_waiting >= _MAX_WAITING:
            raise Overloaded(
                f"{_MAX_WAITING} chat templates of other requests are waiting; retry later",
                retry_after_ms=1000,
            )
        self._num_waiting += 1
        try:
            async with self._free:
                answer = await self._run(job)
        finally:
            self._num_waiting -= 1
        if "error" in answer:
            raise InvalidArgument(answer["error"], param=answer.get("param") or _PARAM)
        return ChatPrompt(answer["text"], answer["ignored"])

    async def _run(self, job: bytes) -> dict[str, Any]:
        child = self._idle.pop() if self._idle else await _start()
        self._busy.add(child)
        try:
            async with asyncio.timeout(_WALL_S):
                answer = await _ask(child, job)
        except (EOFError, OSError, TimeoutError):
            raise InvalidArgument(
                f"chat_template takes more than {CPU_S:g} s or {MEMORY_BYTES >> 20} MiB; simplify it",
                param=_PARAM,
            ) from None
        else:
            self._busy.discard(child)
            self._idle.append(child)
            return answer
        finally:
            # After a failure, or if the caller was cancelled.
            if child in self._busy:
                self._busy.discard(child)
                await _end(child)

    async def close(self) -> None:
        """Ends the processes that render nothing; the others end with their requests."""
        while self._idle:
            await _end(self._idle.pop())


async def _start() -> Process:
    environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.chat_prompts.sandbox_child", str(CPU_S), str(MEMORY_BYTES), str(MAX_TEXT),
        stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment, start_new_session=True,
    )  # fmt: skip


async def _ask(child: Process, job: bytes) -> dict[str, Any]:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(len(job).to_bytes(8) + job)
    await child.stdin.drain()
    size = int.from_bytes(await child.stdout.readexactly(8))
    answer: dict[str, Any] = json.loads(await child.stdout.readexactly(size))
    return answer


async def _end(child: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    # Its pipes are closed, and it is reaped, even if the caller is cancelled.
    await asyncio.shield(child.communicate())
