"""Agents of other projects, each with two tools and a structured answer, against a real stack."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.environments import agents_python, node_folder, run_client
from tests.support.stack import Stack, running_stack
from worker_svc.model_files.loader import fetch

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack whose model is told in words how to call tools."""
    flags = ("--max-model-len", "4096", "--tool-call-parser", "hermes")
    with running_stack(fetch("smollm2", None), "smollm2", tmp_path_factory.mktemp("stack"), *flags) as stack:
        yield stack


@pytest.fixture(scope="module")
def python() -> Path:
    return agents_python()


@pytest.mark.parametrize("interface", ["chat", "responses"])
@pytest.mark.parametrize("agent", ["langchain_agent.py", "openai_agent.py"])
async def test_python_agents(stack: Stack, python: Path, agent: str, interface: str) -> None:
    """The agent calls a tool, reads its result, and ends with an object of its schema."""
    script = Path(__file__).parent / "agents" / agent
    found = await run_client(python, script, f"{stack.base_url}/v1", stack.model, "unused", interface)
    assert found["called"]
    assert set(found["called"]) <= {"weather", "population"}
    assert set(found["report"]) == {"city", "is_sunny"}


@pytest.mark.skipif(shutil.which("npm") is None, reason="Node.js and npm are not installed")
async def test_the_vercel_ai_sdk(stack: Stack) -> None:
    """The agent calls a tool, answers in a second step, and makes an object of a schema."""
    found = await run_client(
        "node", "vercel_agent.mjs", f"{stack.base_url}/v1", stack.model, "unused", folder=node_folder()
    )
    assert set(found["called"]) <= {"weather", "population"}
    assert found["called"]
    assert (found["steps"], found["text"]) == (2, True)
    assert set(found["report"]) == {"city", "is_sunny"}
    assert found["usage"] > 0
