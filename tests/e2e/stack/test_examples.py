"""The scripts of examples/ run as they are against real stacks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.stack import Stack, running_stack
from worker_svc.model_files.demo_models import fetch

pytestmark = [pytest.mark.e2e, pytest.mark.stack]


def run(script: str, stack: Stack, *arguments: str, key: str = "unused") -> list[str]:
    """Runs a script for a stack; returns the lines that it printed."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *arguments],
        capture_output=True, text=True, timeout=100, check=False, cwd=ROOT,
        env={
            **os.environ, "OPENAI_BASE_URL": f"{stack.base_url}/v1", "OPENAI_API_KEY": key,
            "TRIPTYCH_SCHEDULER_ADDRESS": stack.scheduler_address,
            "PYTHONPATH": str(ROOT),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_chat(stack: Stack) -> None:
    """The stream names Paris; the second answer has the model's fields."""
    lines = run("chat.py", stack)
    assert "Paris" in lines[0]
    assert lines[-1].startswith("name=")


def test_tools(stack: Stack) -> None:
    """The call has the schema's only argument, and the model answers after its result."""
    call, answer = run("tools.py", stack)
    assert call.startswith("call: temperature ")
    assert list(json.loads(call.removeprefix("call: temperature "))) == ["city"]
    assert len(answer) > len("answer: ")


def test_grpc_token_ids(stack: Stack) -> None:
    """The first of five tokens is " Paris"."""
    tokens = [token for line in run("grpc_token_ids.py", stack) for token in json.loads(line)]
    assert len(tokens) == 5
    assert tokens[0] == 7042


@pytest.mark.slow
def test_embeddings(tmp_path: Path) -> None:
    """The sentences with one meaning are closer than the third."""
    with running_stack(fetch("minilm"), "minilm", tmp_path) as stack:
        same, near, far = (float(line.split()[0]) for line in run("embeddings.py", stack))
    assert same == 1
    assert near > 0.5 > far


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # importing torch and transformers
def test_lora(smollm2: Path, tmp_path: Path) -> None:
    """The adapter answers otherwise than the base model."""
    from tests.support.worker.peft_adapters import AdapterSpec, write_adapter

    adapter = write_adapter(smollm2, tmp_path / "adapter", AdapterSpec(seed=1))
    with running_stack(
        smollm2, "smollm2", tmp_path / "run", "--enable-lora", TRIPTYCH_ADMIN_API_KEY="an-admin-key"
    ) as stack:
        base, adapted = run("lora.py", stack, str(adapter), key="an-admin-key")
    assert base.startswith("smollm2: ")
    assert adapted.startswith("mine: ")
    assert base.split(": ")[1] != adapted.split(": ")[1]
