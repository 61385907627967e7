"""`triptych chat`, `bench` and `run-batch` against a real stack."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.timeout(120)]

BODY = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 16,
}


def triptych(*argv: str) -> str:
    """Runs a command; returns its standard output."""
    command = (sys.executable, "-m", "deploy.cli", *argv)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def batch(folder: Path, *names: str) -> tuple[str, str, str, str]:
    """Writes a batch with the same question under several ids; returns the flags that name its files."""
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": BODY} for name in names
    ]
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return "-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")


def answers(folder: Path) -> dict[str, str]:
    """Returns the answers of a batch by custom id."""
    lines = map(json.loads, (folder / "out.jsonl").read_text().splitlines())
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}


@pytest.mark.slow
def test_a_question_is_answered(stack: Stack) -> None:
    """The whole answer is on standard output; the statistics follow it."""
    printed = triptych("chat", "-q", "Say hi.", "--stats", "--max-tokens", "20", "--url", stack.base_url)
    answer, ttft, tps = printed.rsplit("\n", 3)[:3]
    assert answer.strip()
    assert ttft.startswith("TTFT:")
    assert tps.startswith("TPS:")


def test_a_bench_runs_vllm_s(stack: Stack, smollm2: Path, tmp_path: Path) -> None:
    """The load generator of vLLM prints its table and writes its file."""
    flags = ("--base-url", stack.base_url, "--tokenizer", str(smollm2), "--num-prompts", "3")
    lengths = ("--random-input-len", "32", "--random-output-len", "4", "--ignore-eos")
    file = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "bench.json")
    assert "Serving Benchmark Result" in triptych("bench", "serve", *flags, *lengths, *file)
    result = json.loads((tmp_path / "bench.json").read_text())
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (3, 96, 12)


def test_a_batch_runs_on_a_running_stack(stack: Stack, tmp_path: Path) -> None:
    """Bodies that name no model get the served one."""
    out = triptych("run-batch", *batch(tmp_path, "a", "b"), "--url", stack.base_url)
    assert out.startswith("2 succeeded,")
    assert {name: "Paris" in answer for name, answer in answers(tmp_path).items()} == {"a": True, "b": True}


@pytest.mark.slow
def test_a_batch_starts_a_stack_of_its_own(smollm2: Path, tmp_path: Path) -> None:
    """--model and the flags of `triptych up` serve the batch, and nothing is left running."""
    # In bfloat16, processors with matrix units give another answer.
    sizes = ("--dtype", "float32", "--max-model-len", "512")
    flags = ("--model", str(smollm2), *sizes, "--run-dir", str(tmp_path / "run"))
    out = triptych("run-batch", *batch(tmp_path, "a"), *flags)
    assert out.startswith("1 succeeded,")
    assert "Paris" in answers(tmp_path)["a"]
    pids = [int(path.read_text()) for path in (tmp_path / "run").glob("*.pid")]
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
