"""The format of tool calls that a chat template shows."""

import json
from pathlib import Path

import pytest

from gateway.text.chat_template import ChatTemplate, end_of_thoughts, tool_format
from gateway.text.tokenization import TextCodec
from tests.support.gateway.tool_templates import TEMPLATES, THINKING, folder_with


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_its_format(name: str) -> None:
    assert tool_format(ChatTemplate(TEMPLATES[name], {})) == name


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages }}",
        "{{ tools }}{{ messages }}",
        "{{ tools }}{{ raise_exception('no') }}",
        # Markers of other formats around the same JSON.
        TEMPLATES["llama3_json"].replace('{"name"', '<|tool_call|>{"name"'),
        TEMPLATES["pythonic"].replace("[{{", "<|tool_call_start|>[{{"),
        TEMPLATES["hermes"].replace('{"name"', '<function={"name"'),
    ],
)
def test_other_templates_show_no_format(source: str) -> None:
    """An unknown format is not guessed: a wrong guess would lose calls."""
    assert tool_format(ChatTemplate(source, {})) is None


@pytest.mark.parametrize(
    ("source", "end"),
    [
        (THINKING, "\n</think>\n\n"),
        ("{% for m in messages %}{{ m.reasoning }}</think>{{ m.content }}{% endfor %}", "</think>"),
        # Thoughts that are dropped, or joined by more than an end.
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "</think>"),
        ("{% for m in messages %}{{ m.reasoning }}</think>So: {{ m.content }}{% endfor %}", "</think>"),
        ("{{ raise_exception('no') }}", "</think>"),
    ],
)
def test_a_thought_ends_as_the_template_ends_it(source: str, end: str) -> None:
    assert end_of_thoughts(ChatTemplate(source, {}), "</think>") == end


def test_a_separate_template_for_tools_is_used(tmp_path: Path) -> None:
    (folder := folder_with(tmp_path, "", [])).joinpath("chat_template.jinja").unlink()
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": TEMPLATES["hermes"]}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    codec = TextCodec.load(folder)
    assert codec.chat_template is not None
    assert codec.chat_template.source == "D"
    assert codec.tool_template is not None
    assert codec.tool_template.source == TEMPLATES["hermes"]
    assert codec.tool_format == "hermes"
