"""Two served models, one with tools and thinking and one with neither, loaded once per module."""

import sys
from collections.abc import Iterator

import pytest

from gateway.scheduler_client.served_model import ServedModel
from tests.support.gateway.serving import smollm2_folder
from tests.support.gateway.tool_requests import served_with
from tests.support.gateway.tool_templates import THINKING, folder_with


@pytest.fixture(autouse=True)
def python_stack() -> Iterator[None]:
    """Gives a test the stack of a gateway's process: compilers in the process raise its limit to 2,000."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """A model that calls tools as Qwen does, and thinks between special tokens."""
    return served_with(
        folder_with(tmp_path_factory.mktemp("qwen"), THINKING, ["<tool_call>", "<think>", "</think>"])
    )


@pytest.fixture(scope="module")
def smollm2() -> ServedModel:
    """A model with neither tools nor thinking."""
    return served_with(smollm2_folder())
