"""`triptych run-batch` against a real gateway."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protos.errors import InvalidArgument, Overloaded
from tests.support.gateway.commands import Command
from tests.support.gateway.fake_scheduler import FakeScheduler, serving
from tests.support.gateway.serving import TEXT, Stack, running_gateway, smollm2_folder

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}]}


def line(custom_id: str, url: str = "/v1/chat/completions", **changes: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": CHAT, **changes})


def write(folder: Path, *lines: str) -> tuple[Path, Path]:
    """Writes an input file; returns it and the output file."""
    (folder / "in.jsonl").write_text("".join(f"{each}\n" for each in lines))
    return folder / "in.jsonl", folder / "out.jsonl"


def results(path: Path) -> dict[str | None, dict[str, Any]]:
    """Returns the lines of an output file by custom id."""
    return {entry["custom_id"]: entry for entry in map(json.loads, path.read_text().splitlines())}


async def test_each_request_has_a_line_in_openai_s_form(triptych: Command, tmp_path: Path) -> None:
    """Answers of several routes are there by custom id, with their status and request id."""
    source, output = write(
        tmp_path,
        line("chat"),
        line("text", "/v1/completions", body={"model": "smollm2", "prompt": "x"}),
        line("response", "/v1/responses", body={"model": "smollm2", "input": "x"}),
        line("bad", "/v1/completions", body={"model": "smollm2", "prompt": "x", "temperature": -1}),
    )
    done = await triptych("run-batch", "-i", str(source), "-o", str(output))
    assert (done.code, done.out) == (
        0,
        f"3 succeeded, 1 failed, 0 invalid lines, 0 done before; written to {output}\n",
    )
    found = results(output)
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["content"] == TEXT
    assert found["text"]["response"]["body"]["choices"][0]["text"] == TEXT
    assert found["response"]["response"]["body"]["object"] == "response"
    assert found["bad"]["response"]["status_code"] == 400
    assert "temperature" in found["bad"]["response"]["body"]["error"]["message"]
    assert {entry["error"] for entry in found.values()} == {None}
    assert all(entry["id"].startswith("batch_req_") for entry in found.values())
    assert all(entry["response"]["request_id"] for entry in found.values())


async def test_pooling_models_take_batches(triptych: Command, tmp_path: Path) -> None:
    texts = {"query": "x", "documents": ["y", "z"]}
    source, output = write(
        tmp_path,
        line("embed", "/v1/embeddings", body={"model": "minilm", "input": "x"}),
        line("score", "/score", body={"model": "minilm", "text_1": "x", "text_2": ["y", "z"]}),
        line("rerank", "/v2/rerank", body={"model": "minilm", **texts}),
    )
    scheduler = FakeScheduler(smollm2_folder(), model="minilm", max_model_len=64, pooled_size=4)
    async with serving(scheduler) as server, running_gateway(server.port) as gateway:
        done = await triptych("run-batch", "-i", str(source), "-o", str(output), "--url", gateway.base_url)
    assert "3 succeeded," in done.out
    bodies = {name: entry["response"]["body"] for name, entry in results(output).items()}
    assert len(bodies["embed"]["data"][0]["embedding"]) == 4
    assert len(bodies["score"]["data"]) == len(bodies["rerank"]["results"]) == 2


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "Invalid JSON"),
        ("[]", "should be an object"),
        ("{}", "custom_id: Field required"),
        (line(""), "custom_id: "),
        (line("a"), "custom_id 'a' is that of an earlier line"),
        (line("b", method="GET"), "method: Input should be 'POST'"),
        (line("b", "/v1/models"), "url: Input should be '/v1/chat/completions'"),
        (line("b", body=[]), "body: "),
        (line("b", body={**CHAT, "stream": True}), "omit stream"),
    ],
    ids=["text", "list", "id", "empty", "twice", "method", "url", "body", "stream"],
)
async def test_a_bad_line_is_an_error_line(triptych: Command, tmp_path: Path, bad: str, reason: str) -> None:
    source, output = write(tmp_path, line("a"), bad, "", line("c"))
    await triptych("run-batch", "-i", str(source), "-o", str(output))
    entries = [json.loads(each) for each in output.read_text().splitlines()]
    (error,) = [entry for entry in entries if entry["error"]]
    assert error["response"] is None
    assert error["error"]["line"] == 2
    assert reason in error["error"]["message"]
    assert {entry["custom_id"] for entry in entries if entry["response"]} == {"a", "c"}
    again = await triptych("run-batch", "-i", str(source), "-o", str(output))
    assert again.out.startswith("0 succeeded, 0 failed, 0 invalid lines, 3 done before;")
    assert len(output.read_text().splitlines()) == 3


async def test_a_batch_goes_on_where_it_was_cut_off(stack: Stack, triptych: Command, tmp_path: Path) -> None:
    """Finished requests do not run again, and a half-written last line is replaced."""
    source, output = write(tmp_path, line("a"), line("b"))
    await triptych("run-batch", "-i", str(source), "-o", str(output), "--max-concurrency", "1")
    output.write_bytes(output.read_bytes()[:-20])
    stack.scheduler.requests.clear()
    done = await triptych("run-batch", "-i", str(source), "-o", str(output))
    assert done.out.startswith("1 succeeded, 0 failed, 0 invalid lines, 1 done before;")
    assert len(stack.scheduler.requests) == 1
    assert results(output).keys() == {"a", "b"}


@pytest.mark.parametrize("content", ["notes without a line's end", '{"id": 1}', "first\nsecond"])
async def test_another_file_is_left_alone(triptych: Command, tmp_path: Path, content: str) -> None:
    """Only a beginning like a batch's line can be a line that was cut off."""
    source, output = write(tmp_path, line("a"))
    output.write_text(content)
    done = await triptych("run-batch", "-i", str(source), "-o", str(output))
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "is not the output of a batch" in done.err
    assert output.read_text() == content


async def test_a_lost_server_stops_the_batch(triptych: Command, tmp_path: Path) -> None:
    source, output = write(tmp_path, line("a"))
    done = await triptych("run-batch", "-i", str(source), "-o", str(output), "--url", "http://127.0.0.1:9")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "cannot reach http://127.0.0.1:9" in done.err


@pytest.mark.parametrize(
    ("flags", "last"),
    [
        (("--max-num-seqs", "0"), "the stack did not start, see above"),
        (("--url", "http://127.0.0.1:9"), "omit one of them"),
    ],
)
async def test_a_stack_that_does_not_start_is_named(
    tmp_path: Path, flags: tuple[str, str], last: str
) -> None:
    """`triptych up` says what is wrong with its flags, and the batch does not begin."""
    source, output = write(tmp_path, line("a"))
    command = [sys.executable, "-m", "deploy.cli", "run-batch", "-i", str(source), "-o", str(output)]
    command += ["--model", str(tmp_path), *flags]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert done.returncode in {1, 2}
    assert last in done.stderr.splitlines()[-1]
    assert not output.exists()


async def test_only_so_many_run_at_once(stack: Stack, triptych: Command, tmp_path: Path) -> None:
    """With one request at a time, answers are in the order of the input."""
    names = [f"request-{number}" for number in range(8)]
    source, output = write(tmp_path, *map(line, names))
    await triptych("run-batch", "-i", str(source), "-o", str(output), "--max-concurrency", "1")
    assert list(results(output)) == names


async def test_a_busy_server_is_asked_again(stack: Stack, triptych: Command, tmp_path: Path) -> None:
    """A refusal for overload is no answer yet; other refusals are."""
    busy = iter([Overloaded("later", retry_after_ms=1), Overloaded("later", retry_after_ms=1), None])
    stack.scheduler.refuse = lambda _: next(busy)
    source, output = write(tmp_path, line("a"))
    done = await triptych("run-batch", "-i", str(source), "-o", str(output))
    assert done.out.startswith("1 succeeded,")
    stack.scheduler.refuse = lambda _: InvalidArgument("never")
    source, output = write(tmp_path, line("b"))
    done = await triptych("run-batch", "-i", str(source), "-o", str(output))
    assert done.out.startswith("0 succeeded, 1 failed,")


@pytest.mark.parametrize(
    ("flags", "code", "error"),
    [
        (("-i", "nowhere", "-o", "out"), 1, "nowhere: No such file"),
        (("-i", "pyproject.toml", "-o", "README.md"), 1, "README.md is not the output of a batch"),
        (("-i", "pyproject.toml", "-o", "nowhere/out"), 1, "nowhere/out: No such file"),
        (("-i", "a", "-o", "b", "--max-model-len", "9"), 2, "unrecognized arguments: --max-model-len;"),
        (("-i", "a", "-o", "b", "--max-concurrency", "0"), 2, "invalid"),
        (("-i", "pyproject.toml", "-o", "b", "--api-key", "wrong"), 1, "the server answered 401"),
    ],
    ids=["input", "output", "folder", "flag", "number", "key"],
)
async def test_what_cannot_run_is_one_line(
    triptych: Command, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], code: int, error: str
) -> None:
    if code == 2:
        with pytest.raises(SystemExit) as stopped:
            await triptych("run-batch", *flags)
        assert stopped.value.code == 2
        text = capsys.readouterr().err
    else:
        text = (await triptych("run-batch", *flags)).err
    assert error in text
    assert text.count("\n") == 1
