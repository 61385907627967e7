"""Content reaches a chat template in a form that the template shows."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gateway.text.chat_template import ChatTemplate, ContentForm
from protos.errors import InvalidArgument

TEXTS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
JSON = "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson }}{% endfor %}"
TURNS = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
OBJECTS = "{% for m in messages %}<{{ m.role }}>{{ {'content': m.content} | tojson(indent=1) }}{% endfor %}"
SORTED = "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson(indent=1, sort_keys=true) }}{% endfor %}"
PYTHON = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TWICE = "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson | tojson }}{% endfor %}"
LISTS = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{{ p.lang }};{% endif %}{% endfor %}{% endfor %}"
)
# Lists for users alone, as Llama 3.2's template with images has it.
USERS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role != 'user' or m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{{ p.lang }};{% endfor %}{% endif %}{% endfor %}"
)
KNOWN = "{% for m in messages %}{% if m.role in ['user', 'ipython'] %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"

PARTS = [{"type": "text", "text": "a", "lang": "en"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("source", "role", "content", "text"),
    [
        (TEXTS, "user", "hi", "<user>hi"), (TEXTS, "user", PARTS, "<user>a\nb"), (TEXTS, "bob", "hi", "<bob>hi"),
        (JSON, "user", PARTS, '<user>"a\\nb"'), (SORTED, "user", PARTS, '<user>"a\\nb"'), (PYTHON, "user", PARTS, "<user>a\nb"),
        (TWICE, "user", PARTS, '<user>"\\"a\\\\nb\\""'), (TURNS, "bob", "hi", '{"role": "bob", "content": "hi"}'),
        (OBJECTS, "bob", "hi", '<bob>{\n "content": "hi"\n}'), (OBJECTS, "user", PARTS, '<user>{\n "content": "a\\nb"\n}'),
        (LISTS, "user", "hi", "<user>hi;"), (LISTS, "user", PARTS, "<user>aen;b;"), (LISTS, "user", "", "<user>"),
        (LISTS, "assistant", "hi", "<assistant>hi;"), (LISTS, "tool", PARTS, "<tool>a\nb;"),
        (LISTS, "developer", "hi", "<system>hi;"), (LISTS, "bob", "hi", "<bob>hi;"),
        (USERS, "user", "hi", "<user>hi"), (USERS, "user", PARTS, "<user>aen;b;"),
        (USERS, "system", PARTS, "<system>a\nb"), (USERS, "tool", PARTS, "<tool>a\nb"),
        (KNOWN, "ipython", "hi", "<ipython>hi"), (KNOWN, "assistant", "hi", ""),
    ],
)  # fmt: skip
def test_content_has_the_form_that_the_template_shows(
    source: str, role: str, content: Any, text: str
) -> None:
    """Parts arrive one by one where the template has a loop for them, and else as one text."""
    template = ChatTemplate(source, {})
    for _ in range(2):
        assert template.render([{"role": role, "content": content}], add_generation_prompt=False) == text


@pytest.mark.parametrize("content", ["hi", PARTS])
def test_a_role_that_the_template_drops_is_refused(content: Any) -> None:
    """The model would answer as if the message were not there."""
    with pytest.raises(InvalidArgument, match="does not show messages with the role 'bob'"):
        ChatTemplate(KNOWN, {}).render([{"role": "bob", "content": content}], add_generation_prompt=False)


def test_made_up_roles_do_not_use_up_the_memory() -> None:
    """What a template shows is found out once for a new role, even after many others."""
    probes = 0

    def write(turns: Sequence[Mapping[str, Any]]) -> str:
        nonlocal probes
        probes += 1
        return str(turns)

    form = ContentForm(write)
    for number in range(200):
        form.fit({"role": f"r{number}", "content": "hi"})
    probes = 0
    for _ in range(3):
        form.fit({"role": "new", "content": "hi"})
    assert probes == 1


def test_a_last_turn_of_parts_is_continued() -> None:
    """Also where the template wants lists."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": PARTS}]
    text = ChatTemplate(LISTS, {}).render(turns, add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>q;<assistant>a\nb"
