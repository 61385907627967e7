"""Templates of clients run in processes that end beyond their limits."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.chat_prompts import sandbox
from gateway.chat_prompts.chat_input import ChatInput
from gateway.chat_prompts.sandbox import TemplateSandbox, job_of
from protos.errors import InvalidArgument, Overloaded

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = ChatInput([{"role": "user", "content": "hi"}])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def templates() -> AsyncIterator[TemplateSandbox]:
    """Lasts for all tests, because a process takes a moment to start."""
    made = TemplateSandbox()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "CPU_S", 0.3)
        yield made
    await made.close()


async def written(templates: TemplateSandbox, source: str) -> str:
    """Returns the text that a template writes."""
    return (await templates.write(job_of(source, {"bos_token": "<s>"}, CHAT))).text


async def test_a_template_writes_a_prompt(templates: TemplateSandbox) -> None:
    """One process renders one template after the other."""
    for _ in range(2):
        assert await written(templates, "{{ bos_token }}{{ messages[0].content }}") == "<s>hi"
    assert len(templates._idle) == 1


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 0.3 s"),
        ("{{ 9 ** (9 ** 9) }}", "more than 0.3 s"),
        ("{{ 'a' * 999999999 }}", "MemoryError"),
        ("{{ 'a' * 9999999 }}", "9999999 characters; the limit is 8388608"),
        ("{% if %}", "cannot be compiled"),
        ("{{ raise_exception('no') }}", "refuses these messages: no"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)
async def test_a_bad_template_is_the_clients_error(
    templates: TemplateSandbox, source: str, text: str
) -> None:
    """Endless, huge, broken and curious templates end with one line; the next template is rendered."""
    with pytest.raises(InvalidArgument, match=text) as refused:
        await written(templates, source)
    assert "\n" not in refused.value.message
    assert await written(templates, "{{ messages[0].content }}") == "hi"


async def test_a_process_has_no_secrets(templates: TemplateSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment has nothing but the paths of its modules."""
    await templates.close()
    monkeypatch.setenv("TRIPTYCH_ADMIN_API_KEY", "secret")
    await written(templates, "x")
    (child,) = templates._idle
    with open(f"/proc/{child.pid}/environ", encoding="utf-8") as environment:  # noqa: ASYNC230, PTH123
        assert "secret" not in environment.read()
    assert len(os.listdir(f"/proc/{child.pid}/fd")) == 3  # noqa: PTH208


async def test_a_client_that_leaves_ends_its_template(
    templates: TemplateSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled template leaves no process behind."""
    await templates.close()
    monkeypatch.setattr(sandbox, "CPU_S", 60)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    task = asyncio.create_task(written(templates, endless))
    while not templates._busy:
        await asyncio.sleep(0)
    (child,) = templates._busy
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert child.returncode is not None


async def test_waiting_templates_are_bounded(
    templates: TemplateSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the bound, a request is told to retry."""
    monkeypatch.setattr(sandbox, "_MAX_WAITING", 0)
    with pytest.raises(Overloaded, match="retry later"):
        await written(templates, "x")
