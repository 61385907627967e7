"""The README's examples run as written, except for the port."""

import json
import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.stack]

README = (ROOT / "README.md").read_text()


def example(name: str, stack: Stack) -> str:
    """Returns the code block after ``<!-- example: name -->``."""
    match = re.search(rf"<!-- example: {name} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert match is not None, f"the README has no example called {name}"
    code = match[1]
    assert "127.0.0.1:8000" in code
    return code.replace("127.0.0.1:8000", stack.base_url.removeprefix("http://"))


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_curl_line_answers_with_a_chat_completion(stack: Stack) -> None:
    """The answer is JSON and names Paris."""
    answer = json.loads(run(["bash", "-c", example("curl", stack)]))
    assert answer["object"] == "chat.completion"
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_the_openai_client_streams_an_answer(stack: Stack) -> None:
    """The stream has the same answer in pieces."""
    assert "Paris" in run([sys.executable, "-c", example("openai", stack)])
