"""`triptych chat` and `triptych complete` against a real gateway."""

import asyncio
import io
import json
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from protos.errors import InvalidArgument
from tests.support.gateway.commands import KEY, Command
from tests.support.gateway.serving import TEXT, Stack, running_stack
from tests.support.security.certificates import ca, service_files

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]


@pytest.mark.parametrize("path", ["", "/", "/v1/"])
async def test_a_quick_answer_is_all_that_is_printed(stack: Stack, triptych: Command, path: str) -> None:
    """The answer is on standard output alone, so that it can be piped; the address may end in any way."""
    done = await triptych("chat", "-q", "hi", "--url", stack.gateway.base_url + path)
    assert (done.code, done.out) == (0, f"{TEXT}\n")
    assert done.err == "Using model: smollm2\n"


async def test_a_conversation_remembers(
    stack: Stack, triptych: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line of standard input is a message after the earlier ones; a refused one is forgotten."""
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\nthree\n"))
    refused = iter([None, InvalidArgument("not that one"), None])
    stack.scheduler.refuse = lambda _: next(refused)
    done = await triptych("chat", "--system-prompt", "Be brief.")
    assert (done.code, done.out) == (0, f"{TEXT}\n{TEXT}\n")
    assert done.err.splitlines()[1:] == ["the server answered 400: not that one"]
    last = stack.prompt
    assert "Be brief." in last
    assert "three" in last
    assert TEXT in last
    assert "two" not in last


@pytest.mark.parametrize("command", ["chat", "complete"])
async def test_answers_end_where_they_should(stack: Stack, triptych: Command, command: str) -> None:
    """--max-tokens limits the answer, and --stats says how long it took."""
    done = await triptych(command, "-q", "Paris", "--max-tokens", "3", "--stats")
    answer, ttft, tps = done.out.splitlines()
    assert done.code == 0
    assert answer == "Paris is the"
    assert ttft.startswith("TTFT:")
    assert "(3 tokens in" in tps


@pytest.mark.parametrize(
    ("flags", "code", "error"),
    [
        (("--api-key", "wrong"), 1, "the server answered 401: "),
        (("--api-key", "schlüssel"), 2, "the API key has characters that no key has; "),
        (("--model-name", "other"), 1, "the server answered 404: "),
        (("--url", "localhost:8000"), 2, "--url localhost:8000 is not an address; "),
        (("--url", "http://127.0.0.1:9"), 1, "cannot reach http://127.0.0.1:9: "),
        (("--url", "https://localhost", "--ca-file", "nowhere"), 2, "the certificates in nowhere cannot"),
    ],
    ids=["key", "letters", "model", "address", "unreachable", "ca"],
)
async def test_what_fails_is_one_line(
    triptych: Command, flags: tuple[str, ...], code: int, error: str
) -> None:
    """The line says what was wrong, and the exit code is 2 if a flag was."""
    done = await triptych("chat", "-q", "hi", *flags)
    assert (done.code, done.out) == (code, "")
    assert done.err.splitlines()[-1].startswith(f"triptych chat: {error}")
    assert len(done.err.splitlines()) <= 2


async def test_a_proxy_that_cannot_be_used_is_one_line(
    triptych: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the variables that may have set it."""
    monkeypatch.setenv("ALL_PROXY", "ftp://proxy")
    done = await triptych("chat", "-q", "hi")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "change HTTP_PROXY, HTTPS_PROXY or ALL_PROXY" in done.err


async def test_a_private_ca_is_trusted_when_named(
    triptych: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --ca-file or SSL_CERT_FILE the certificate is refused, and the line says what to give."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    paths = service_files(tmp_path)
    ca_file = tmp_path / "trusted.pem"
    ca_file.write_bytes(ca("ours").pem)
    async with running_stack(TEXT, ssl_certfile=paths.cert, ssl_keyfile=paths.key) as stack:
        url = stack.gateway.base_url.replace("http://127.0.0.1", "https://localhost")
        refused = await triptych("chat", "-q", "hi", "--url", url)
        trusted = await triptych("chat", "-q", "hi", "--url", url, "--ca-file", str(ca_file))
        monkeypatch.setenv("SSL_CERT_FILE", str(ca_file))
        by_variable = await triptych("chat", "-q", "hi", "--url", url)
    assert refused.code == 1
    assert refused.err.endswith("give its CA with --ca-file\n")
    assert trusted.err == "Using model: smollm2\n"
    assert trusted.out == by_variable.out == f"{TEXT}\n"


@pytest.fixture
def foreign() -> Iterator[Callable[..., str]]:
    """Starts another project's server, which sends the same text for every request; returns its URL."""
    servers = []

    def start(text: str, status: int = 200) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                """Prints nothing."""

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def events(*fields: dict[str, Any] | str) -> str:
    """Returns the events of a stream: chunks of a chat, or a text as it is."""
    chunks = [
        each if isinstance(each, str) else json.dumps({"choices": [{"delta": each}]}) for each in fields
    ]
    return "".join(f"data: {chunk}\n\n" for chunk in chunks)


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_thinking_is_shown_apart(triptych: Command, foreign: Callable[..., str], field: str) -> None:
    """In vLLM's tags, whichever name it has; comments are left out, and an open tag is closed."""
    thinking = (
        events({"role": "assistant", "content": ""}, {field: "Hm"}) + ": alive\n\n" + events({field: "m."})
    )
    chat = ("chat", "-q", "hi", "--model-name", "m", "--url")
    done = await triptych(*chat, foreign(thinking + events({"content": "Pa"}, {"content": "ris"}, "[DONE]")))
    assert (done.code, done.out) == (0, "<think>\nHmm.\n</think>\nParis\n")
    done = await triptych(*chat, foreign(thinking))
    assert (done.code, done.out) == (0, "<think>\nHmm.\n</think>\n")


@pytest.mark.parametrize(
    ("text", "status", "error"),
    [
        (
            events({"content": "Pa"}, '{"error": {"message": "the worker\\n is lost"}}'),
            200,
            "the worker is lost",
        ),
        (events({"content": "Pa"}, "{"), 200, "broke off: "),
        ('{"error": {"message": "no\\nway"}}', 500, "500: no way"),
        ('{"message": "no way"}', 500, "500: no way"),
        ("<html>no</html>", 500, "500: <html>no</html>"),
        ("", 500, "500: without a message"),
    ],
    ids=["event", "cut", "openai", "message", "html", "empty"],
)
async def test_an_error_of_any_server_is_one_line(
    triptych: Command, foreign: Callable[..., str], text: str, status: int, error: str
) -> None:
    """Its body may have OpenAI's form, another form, or none."""
    done = await triptych("chat", "-q", "hi", "--model-name", "m", "--url", foreign(text, status))
    assert done.code == 1
    assert error in done.err.splitlines()[-1]
    assert len(done.err.splitlines()) == 2


async def test_a_server_without_models_asks_for_a_name(
    triptych: Command, foreign: Callable[..., str]
) -> None:
    done = await triptych("chat", "-q", "hi", "--url", foreign('{"object": "list", "data": []}'))
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "name one with --model-name" in done.err


async def test_ctrl_c_ends_an_answer_and_then_the_program(stack: Stack) -> None:
    """The first one aborts the request, and the conversation goes on; at the prompt, it ends the program."""
    stack.scheduler.pause_after = 2
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy.cli", "chat", "--api-key", KEY, "--url", stack.gateway.base_url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"first\n")
    assert await process.stdout.readexactly(5) == b"Paris"
    await interrupt(process, stack.scheduler.until(lambda: len(stack.scheduler.aborted) == 1))
    stack.scheduler.pause_after = None
    process.stdin.write(b"second\n")
    await process.stdout.readuntil(b"Seine.\n")
    await interrupt(process, process.wait())
    assert process.returncode == 130
    assert (await process.communicate())[1] == b"Using model: smollm2\n"
    assert "second" in stack.prompt


async def interrupt(process: asyncio.subprocess.Process, effect: Coroutine[Any, Any, Any]) -> None:
    """Presses Ctrl-C until it takes effect.

    The interpreter notes a signal that arrives just before a blocking system call only after that call.
    """
    task = asyncio.create_task(effect)
    while not task.done():
        process.send_signal(signal.SIGINT)
        await asyncio.wait([task], timeout=5)
    await task
