"""Chat templates, compared with transformers' own rendering, and the form of content that they show."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.text.chat_template import ChatTemplate, ContentForm
from gateway.text.tokenization import TextCodec
from protos.errors import InvalidArgument
from tests.support.gateway.serving import smollm2_folder

CONVERSATIONS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "<c> & 'd'\n"},
    ],
    [{"role": "user", "content": ""}],
]

TEMPLATES = {
    "llama": "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m.content | trim }}{{ eos_token }}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "loop": "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "blocks": "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "prompt": "{% if add_generation_prompt %}GO{% endif %}{% if tools %}T{% endif %}{% if documents is defined %}D{% endif %}",
}


def reference(source: str, messages: list[dict[str, str]], **variables: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=source, **variables)
    text: str = rendered[0]
    return text


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("name", ["smollm2", *TEMPLATES])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers_does(name: str, messages: Any, add_generation_prompt: bool) -> None:
    source = TEMPLATES.get(name) or (smollm2_folder() / "chat_template.jinja").read_text()
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    ours = ChatTemplate(source, special).render(messages, add_generation_prompt=add_generation_prompt)
    assert ours == reference(source, messages, add_generation_prompt=add_generation_prompt, **special)


def test_a_template_may_refuse() -> None:
    """raise_exception becomes a 400 with the template's own words."""
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidArgument, match="roles must alternate") as caught:
        template.render([], add_generation_prompt=True)
    assert caught.value.param == "messages"


def test_templates_cannot_reach_into_python() -> None:
    """Templates run in a sandbox: they come with the model's files."""
    template = ChatTemplate("{{ ''.__class__.__mro__ }}", {})
    with pytest.raises(InvalidArgument, match="unsafe"):
        template.render([], add_generation_prompt=True)


def test_a_templates_own_names_are_taken() -> None:
    """A variable cannot replace the messages or a special token."""
    template = ChatTemplate("{% if enable_thinking %}T{% endif %}", {"bos_token": "<s>"})
    assert template.render([], add_generation_prompt=True, variables={"enable_thinking": True}) == "T"
    for name in ("documents", "messages", "bos_token"):
        with pytest.raises(InvalidArgument, match=f"cannot set '{name}'"):
            template.render([], add_generation_prompt=True, variables={name: 1})


@pytest.mark.parametrize("content", ["One", " One ", "One\n\n", "", "<|im_end|>"])
@pytest.mark.parametrize("shown", ["m.content", "m.content | trim"])
def test_a_last_turn_is_continued_as_transformers_does(content: str, shown: str) -> None:
    """The prompt ends where the last message's content ends, also if the template trims it."""
    source = "{% for m in messages %}<{{ m.role }}>{{ " + shown + " }}</>{% endfor %}"
    turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": content}]
    text = ChatTemplate(source, {}).render(turns, add_generation_prompt=False, continue_final_message=True)
    assert text == reference(source, turns, add_generation_prompt=False, continue_final_message=True)


def test_a_template_that_hides_the_last_turn_cannot_continue_it() -> None:
    with pytest.raises(InvalidArgument, match="does not show the last message") as refused:
        ChatTemplate("x", {}).render(
            [{"role": "user", "content": "a"}], add_generation_prompt=False, continue_final_message=True
        )
    assert refused.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("source", "role"),
    [("{{ messages[0].role }}", "system"), ("{# developer #}{{ messages[0].role }}", "developer")],
)
def test_developers_are_the_system_where_the_template_does_not_know_them(source: str, role: str) -> None:
    text = ChatTemplate(source, {}).render(
        [{"role": "developer", "content": "x"}], add_generation_prompt=False
    )
    assert text == role


def folder_with(tmp_path: Path, config: dict[str, Any], template: str | None = None) -> Path:
    (tmp_path / "tokenizer.json").write_bytes((smollm2_folder() / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


@pytest.mark.parametrize(
    ("config", "file", "text"),
    [
        ({"chat_template": "C"}, None, "C"),
        ({"chat_template": "C"}, "F", "F"),
        (
            {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]},
            None,
            "D",
        ),
        ({"chat_template": "{{ bos_token }}", "bos_token": {"content": "<b>"}}, None, "<b>"),
    ],
)
def test_a_template_is_found_wherever_models_keep_it(
    tmp_path: Path, config: Any, file: str | None, text: str
) -> None:
    """A template may be a separate file, or an entry in the configuration, with or without a name."""
    codec = TextCodec.load(folder_with(tmp_path, config, file))
    assert codec.chat_template is not None
    assert codec.chat_template.render([], add_generation_prompt=True) == text


def test_variables_too_deep_for_the_template_are_the_clients_fault() -> None:
    """JSON may nest deeper than a template's filters can write; that is an invalid argument."""
    value: Any = []
    for _ in range(1000):
        value = [value]
    with pytest.raises(InvalidArgument, match="chat template refuses"):
        ChatTemplate("{{ x | tojson }}", {}).render([], add_generation_prompt=True, variables={"x": value})


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
    turns: list[dict[str, Any]] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": PARTS}]
    text = ChatTemplate(LISTS, {}).render(turns, add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>q;<assistant>a\nb"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * [1] }}",
        "{{ 10 ** (10 ** 8) }}",
        "{% set ns = namespace(n=3) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    ],
)
def test_a_large_product_is_refused(source: str) -> None:
    """Nothing interrupts a single operation, and its result would fill the memory."""
    with pytest.raises(InvalidArgument, match="is too large"):
        ChatTemplate(source, {}).render([], add_generation_prompt=False)


def test_usual_products_are_computed() -> None:
    source = "{{ 'ab' * 2 }} {{ 2 * 'ab' }} {{ 3 * 1.5 }} {{ 5000000 * 3000000 }} {{ 2 ** 10 }} {{ 2 ** -1 }}"
    text = ChatTemplate(source, {}).render([], add_generation_prompt=False)
    assert text == "abab abab 4.5 15000000000000 1024 0.5"
