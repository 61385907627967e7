"""`triptych bench` against a real gateway."""

import json
from pathlib import Path

import pytest

from protos.errors import InvalidArgument
from tests.support.gateway.commands import Command
from tests.support.gateway.serving import Stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]


async def test_random_prompts_have_the_length_that_was_asked_for(stack: Stack, triptych: Command) -> None:
    """Prompts differ, repeat with the seed, and the table and the line of JSON have vLLM's names."""
    flags = (
        *("bench", "serve", "--random-input-len", "24", "--random-output-len", "5", "--num-prompts", "6"),
        *("--max-concurrency", "2", "--request-rate", "500", "--burstiness", "inf", "--seed", "7"),
    )
    first, second = await triptych(*flags), await triptych(*flags)
    result = json.loads(first.out.splitlines()[-1])
    assert (first.code, result["completed"], result["failed"]) == (0, 6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (6 * 24, 6 * 5)
    assert result["burstiness"] == "inf"
    assert result["max_concurrent_requests"] <= 6
    requests = [tuple(request.prompt_token_ids) for request in stack.scheduler.requests]
    assert {len(prompt) for prompt in requests} == {24}
    assert len(set(requests[:6])) == 6
    assert sorted(requests[:6]) == sorted(requests[6:])
    assert stack.scheduler.requests[0].sampling.ignore_eos
    lines = first.out.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert "Successful requests:                     6         " in lines
    assert "Maximum request concurrency:             2         " in lines
    assert "---------------Time to First Token----------------" in lines
    assert any(line.startswith("P99 ITL (ms):") for line in lines)
    assert second.code == 0


async def test_prefixes_repeat(stack: Stack, triptych: Command, tmp_path: Path) -> None:
    """Each prefix begins the same number of prompts; --json FILE has the figures instead of the output."""
    path = tmp_path / "result.json"
    done = await triptych(
        *("bench", "--dataset-name", "prefix_repetition", "--num-prompts", "6", "--json", str(path)),
        *("--prefix-repetition-num-prefixes", "2", "--prefix-repetition-prefix-len", "16"),
        *("--prefix-repetition-suffix-len", "8", "--prefix-repetition-output-len", "3"),
    )
    assert done.out.endswith(f"{'=' * 50}\n")
    assert json.loads(path.read_text())["total_input_tokens"] == 6 * 24
    prefixes = [tuple(request.prompt_token_ids[:16]) for request in stack.scheduler.requests]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [3, 3]


async def test_a_sharegpt_file_gives_questions_and_lengths(
    stack: Stack, triptych: Command, tmp_path: Path
) -> None:
    """Answers are as long as the recorded ones, unfit conversations are left out, and few are repeated."""
    question, answer = "What is the capital of France?", "It is Paris, on the Seine."
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    path = tmp_path / "sharegpt.json"
    unfit = [{"conversations": turns[:1]}, {"conversations": [{"value": "hi"}, turns[1]]}, {"id": 1}]
    path.write_text(json.dumps([{"conversations": turns}, *unfit]))
    done = await triptych(
        "bench", "--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "3"
    )
    assert done.code == 0
    tokens = {}
    for text in (question, answer):
        tokens[text] = (await stack.http.post("/tokenize", json={"prompt": text})).json()["tokens"]
    assert [list(request.prompt_token_ids) for request in stack.scheduler.requests] == [tokens[question]] * 3
    assert {request.sampling.max_tokens for request in stack.scheduler.requests} == {len(tokens[answer])}


async def test_chats_have_the_same_figures(stack: Stack, triptych: Command) -> None:
    """Random tokens become a user's text, templates count, and a chunk with the role alone is no token."""
    done = await triptych(
        *("bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--random-input-len", "12", "--random-output-len", "4", "--num-prompts", "3", "--ignore-eos"),
        *("--tokenizer", "any/thing"),
    )
    assert done.code == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert (result["backend"], result["completed"], result["total_output_tokens"]) == ("openai-chat", 3, 12)
    assert {request.sampling.max_tokens for request in stack.scheduler.requests} == {4}
    lengths = [len(request.prompt_token_ids) for request in stack.scheduler.requests]
    assert min(lengths) > 12
    assert result["total_input_tokens"] == sum(lengths)
    assert "--tokenizer has no effect: the server counts tokens" in done.err


async def test_vllms_other_flags_of_a_run(stack: Stack, triptych: Command, tmp_path: Path) -> None:
    """Warm-ups count nowhere; lengths, prefix, metrics, percentiles, goodput and file are as asked."""
    done = await triptych(
        *(
            "bench",
            "--random-input-len",
            "20",
            "--random-output-len",
            "4",
            "--num-prompts",
            "5",
            "--ignore-eos",
        ),
        *(
            "--random-range-ratio",
            "0.5",
            "--random-prefix-len",
            "6",
            "--num-warmups",
            "2",
            "--burstiness",
            "0.5",
        ),
        *("--request-rate", "400", "--percentile-metrics", "ttft,e2el", "--metric-percentiles", "50,99.9"),
        *(
            "--goodput",
            "ttft:60000",
            "e2el:60000",
            "--metadata",
            "run=a",
            "x_ttft_ms=a",
            "--label",
            "mine",
            "--save-result",
        ),
        *("--result-dir", str(tmp_path / "new"), "--ready-check-timeout-sec", "5", "--top-p", "0.9"),
    )
    assert done.code == 0, done.err
    (path,) = (tmp_path / "new").iterdir()
    result = json.loads(path.read_text())
    assert path.name.startswith("mine-400.0qps-")
    assert (result["completed"], result["run"], result["x_ttft_ms"]) == (5, "a", "a")
    assert result["request_goodput"] == result["request_throughput"]
    assert {"p50_ttft_ms", "p99.9_e2el_ms", "mean_e2el_ms"} <= result.keys()
    assert not any("itl" in name or "tpot" in name for name in result)
    prompts = [tuple(request.prompt_token_ids) for request in stack.scheduler.requests]
    assert len(prompts) == 7
    assert len({prompt[:6] for prompt in prompts}) == 1
    lengths = {len(prompt) - 6 for prompt in prompts}
    assert len(lengths) > 1
    assert all(10 <= length <= 30 for length in lengths)
    assert stack.scheduler.requests[0].sampling.top_p == pytest.approx(0.9)
    assert any(line.startswith("P99.9 E2EL (ms):") for line in done.out.splitlines())


async def test_failures_are_counted_and_shown(stack: Stack, triptych: Command) -> None:
    """A refused request is a failure with its reason; the exit code is 1 when none succeeded."""
    answers = iter([InvalidArgument("not this one"), None])
    stack.scheduler.refuse = lambda _: next(answers)
    flags = ("bench", "--random-input-len", "8", "--random-output-len", "2", "--num-prompts")
    done = await triptych(*flags, "2")
    result = json.loads(done.out.splitlines()[-1])
    assert (done.code, result["completed"], result["failed"]) == (0, 1, 1)
    assert "failed: 400: not this one" in done.err
    stack.scheduler.refuse = lambda _: InvalidArgument("none at all")
    done = await triptych(*flags, "12")
    assert done.code == 1
    assert done.err.endswith("failed: 2 more\n")


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (
            ("--dataset-name", "sharegpt", "--dataset-path", "nowhere"),
            "nowhere cannot be read (No such file or",
        ),
        (
            ("--dataset-name", "sharegpt", "--dataset-path", "pyproject.toml"),
            "is not a list of conversations",
        ),
    ],
    ids=["no-file", "no-json"],
)
async def test_a_workload_that_cannot_be_is_one_line(
    triptych: Command, flags: tuple[str, ...], error: str
) -> None:
    """The line says what to change."""
    done = await triptych("bench", *flags)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert error in done.err
