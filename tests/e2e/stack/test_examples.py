"""The scripts of examples/ run as they are against real stacks; test_embeddings.py runs embeddings.py."""

import json
from pathlib import Path

import pytest

from tests.support.stack import Stack, run_example, running_stack

pytestmark = [pytest.mark.e2e, pytest.mark.stack]


def test_chat(stack: Stack) -> None:
    """The stream names Paris; the second answer has the model's fields."""
    lines = run_example("chat.py", stack)
    assert "Paris" in lines[0]
    assert lines[-1].startswith("name=")


def test_tools(stack: Stack) -> None:
    """The call has the schema's only argument, and the model answers after its result."""
    call, _, answer = "\n".join(run_example("tools.py", stack)).partition("\nanswer: ")
    assert list(json.loads(call.removeprefix("call: temperature "))) == ["city"]
    assert answer


def test_grpc_token_ids(stack: Stack) -> None:
    """The first of five tokens is " Paris"."""
    tokens = [token for line in run_example("grpc_token_ids.py", stack) for token in json.loads(line)]
    assert len(tokens) == 5
    assert tokens[0] == 7042


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # importing torch and transformers
def test_lora(smollm2: Path, tmp_path: Path) -> None:
    """The adapter answers otherwise than the base model."""
    from tests.support.worker.peft_adapters import AdapterSpec, write_adapter

    adapter = write_adapter(smollm2, tmp_path / "adapter", AdapterSpec(seed=1))
    with running_stack(
        smollm2, "smollm2", tmp_path / "run", "--enable-lora", TRIPTYCH_ADMIN_API_KEY="an-admin-key"
    ) as stack:
        base, adapted = run_example("lora.py", stack, str(adapter), key="an-admin-key")
    assert base.startswith("smollm2: ")
    assert adapted.startswith("mine: ")
    assert base.split(": ")[1] != adapted.split(": ")[1]
