"""The formats that a chat template shows."""

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.parsers.events import CallArguments, CallStart, Event, Reasoning, Text
from gateway.parsers.formats import FORMATS, Format
from gateway.parsers.machine import CallParser
from gateway.parsers.reasoning import SWITCHES, THINKING_FORMATS, ThinkParser, thinking_at
from gateway.parsers.writing import Call, write
from gateway.text.chat_template import ChatTemplate
from gateway.text.derive import Derived, derive
from gateway.text.tokenization import TextCodec
from gateway.tools.grammar import Callee, required, structural
from protos.errors import InvalidArgument
from tests.support.gateway.tool_requests import accepts
from tests.support.gateway.tool_templates import TEMPLATES, folder_with
from tests.support.parsers.chat_templates import FOUND, SPECIAL_TOKENS, formats_of, trl_templates
from tests.support.rbln.wheels import IndexUnreachable

QUESTION = {"role": "user", "content": "What is it?"}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("look_up", {"word": "a < b & 'c'", "count": 2, "options": {"exact": True, "in": ["x, y", None, -0.5]}}),
    ("other", {"word": "5"}),
    ("other", {}),
]
SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string"}, "count": {"type": "integer"}, "options": {"type": "object"}},
}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}}


def answer(template: ChatTemplate, calls: Sequence[tuple[str, dict[str, Any]]], as_text: bool = False) -> str:
    """Returns the text after the header of the answer's turn, or that as far as it agrees with a prompt's."""
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"lookup00{at}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments) if as_text else arguments},
            }
            for at, (name, arguments) in enumerate(calls)
        ],
    }
    tools = [tool("look_up"), tool("other")]
    prompt = template.render([QUESTION], add_generation_prompt=True, tools=tools)
    whole = template.render([QUESTION, turn], add_generation_prompt=False, tools=tools)
    common = next((at for at, (a, b) in enumerate(zip(whole, prompt, strict=False)) if a != b), len(prompt))
    return whole[common:]


def read(form: Format, pieces: Iterable[str]) -> tuple[str, list[tuple[str, Any]]]:
    """Returns the text and the calls in an answer."""
    parser = CallParser(form, {"look_up": SCHEMA, "other": SCHEMA})
    events: list[Event] = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish()
    names = [event.name for event in events if isinstance(event, CallStart)]
    fragments = [
        "".join(each.fragment for each in events if isinstance(each, CallArguments) and each.number == number)
        for number in range(len(names))
    ]
    text = "".join(event.text for event in events if isinstance(event, Text))
    return text, list(zip(names, map(json.loads, fragments), strict=True))


@pytest.mark.parametrize("error", ["10 // (m.content | length)", "'{5}'.format(1)", "range(10 ** 9) | list"])
def test_a_template_that_fails_shows_nothing(error: str) -> None:
    """Its own errors are refusals, at the start and in requests."""
    source = "{% for m in messages %}{% if tools %}{{ ERROR }}{% endif %}{% for c in m.tool_calls %}c{% endfor %}{% endfor %}"
    template = ChatTemplate(source.replace("ERROR", error), {})
    assert derive(template).tools is None
    with pytest.raises(InvalidArgument):
        template.render([{"role": "user", "content": ""}], add_generation_prompt=True, tools=[{"a": 1}])


def test_an_entry_is_chosen_only_if_it_reads_the_calls() -> None:
    """Markers in capital letters resemble those of Hermes, but its parser would not find them."""
    source = TEMPLATES["hermes"].replace("tool_call>", "TOOL_CALL>")
    found = derive(ChatTemplate(source, {}))
    assert found.tool_format is None
    assert found.tools is not None
    text = '<TOOL_CALL>\n{"name": "f", "arguments": {"a": 1}}\n</TOOL_CALL>'
    assert any(isinstance(event, CallStart) for event in CallParser(found.tools, {"f": None}).whole(text))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_an_entry(name: str) -> None:
    found = derive(ChatTemplate(TEMPLATES[name], {}))
    assert (found.tool_format, found.tools) == (name, FORMATS.get(name))


NAME = "{{ c.function.name }}"
ARGUMENTS = "{{ c.function.arguments | tojson }}"
TURN = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}CALLS{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ALL = "{% for c in m.tool_calls %}CALL{% endfor %}"
LIST = "{% for c in m.tool_calls %}CALL{% if not loop.last %}, {% endif %}{% endfor %}"
EACH = "{% for k, v in c.function.arguments.items() %}PARAMETER{% endfor %}"
WORDS = "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | pprint }}{% if not loop.last %}, {% endif %}{% endfor %}"
PLAIN = "{{ v if v is string else v | tojson }}"
# Calls in forms that no entry has.
OWN = {
    "object": ALL.replace("CALL", f'<run>\n{{"function": "{NAME}", "input": {ARGUMENTS}}}\n</run>\n'),
    "object in an object": ALL.replace(
        "CALL", f'<|run|>{{"call": {{"name": "{NAME}", "args": {ARGUMENTS}}}}}'
    ),
    "arguments first": ALL.replace("CALL", f'<run>{{"arguments": {ARGUMENTS}, "name": "{NAME}"}}</run>'),
    "list": f"[RUN][{LIST}][/RUN]".replace("CALL", f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'),
    "list after a known marker": "[TOOL_CALLS]["
    + LIST.replace("CALL", f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}')
    + "][/TOOL_CALLS]",
    "list of no marker": f"[{LIST}]".replace("CALL", f'{{"fn": "{NAME}", "arguments": {ARGUMENTS}}}'),
    "names as keys": f"<|run|>[{LIST}]<|ran|>".replace("CALL", f'{{"{NAME}": {ARGUMENTS}}}'),
    "name and object": ALL.replace("CALL", f"<run={NAME}>{ARGUMENTS}</run>"),
    "id": f"<|calls|>{ALL}<|done|>".replace(
        "CALL", f"<|run|>{NAME}<|id|>{{{{ c.id }}}}<|with|>{ARGUMENTS}<|ran|>"
    ),
    "tags": f"<calls>\n{ALL}</calls>".replace("CALL", f"<run {NAME}>\n{EACH}</run>\n").replace(
        "PARAMETER", f"<with {{{{ k }}}}>{PLAIN}</with>\n"
    ),
    "tags around each call": ALL.replace("CALL", f"<calls>\n<run={NAME}>\n{EACH}</run>\n</calls>\n").replace(
        "PARAMETER", f"<with={{{{ k }}}}>\n{PLAIN}\n</with>\n"
    ),
    "tags with types": ALL.replace("CALL", f"<run>{NAME}<sep>{EACH}</run>").replace(
        "PARAMETER", f"<key>{{{{ k }}}}</key><{{{{ 'text' if v is string else 'json' }}}}>{PLAIN}</value>"
    ),
    "Python": f"<|run|>[{LIST}]<|ran|>".replace("CALL", f"{NAME}({WORDS})"),
}


@pytest.mark.parametrize("form", OWN)
def test_other_forms_get_an_entry_of_their_own(form: str) -> None:
    """The entry reads the template's calls however they are cut, and writes a grammar that accepts them."""
    template = ChatTemplate(TURN.replace("CALLS", OWN[form]), {})
    found = derive(template)
    assert found.tools is not None, found.reason
    assert found.tool_format is None
    assert "robe" not in repr(found.tools), "a text of a probe is no marker"
    text = answer(template, CALLS)
    for size in (len(text), 1, 7):
        content, calls = read(found.tools, [text[at : at + size] for at in range(0, len(text), size)])
        assert calls == CALLS
        assert content.strip() == "<|end|>"
    tag = required(found.tools, [Callee(name, SCHEMA) for name in ("look_up", "other")], parallel=True)
    written = write(found.tools, [Call(name, arguments) for name, arguments in CALLS])
    assert accepts(structural(tag), written)


REFUSING = (
    "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "shows no tools"),
        ("{{ tools }}" + REFUSING, "no calls"),
        ("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", "shows no calls"),
        # A wrong guess would lose calls: the name twice, an id before it, a value that is escaped.
        (
            TURN.replace("CALLS", ALL.replace("CALL", f"<to {NAME}><run={NAME}>{ARGUMENTS}</run>")),
            "<to look_up>",
        ),
        (
            TURN.replace("CALLS", ALL.replace("CALL", f"<id {{{{ c.id }}}}><run={NAME}>{ARGUMENTS}</run>")),
            "<id",
        ),
        (
            TURN.replace(
                "CALLS",
                ALL.replace("CALL", f"<run={NAME}>{EACH}</run>").replace(
                    "PARAMETER", "<with={{ k }}>{{ (v if v is string else v | tojson) | escape }}</with>"
                ),
            ),
            "<run=",
        ),
        (
            TURN.replace(
                "CALLS",
                ALL.replace("CALL", f"<run={NAME}>{EACH}</run>").replace(
                    "PARAMETER",
                    "<with={{ k }}>{{ v.replace('<', '&lt;') if v is string else v | tojson }}</with>",
                ),
            ),
            "<run=",
        ),
        (TURN.replace("CALLS", ALL.replace("CALL", f"{NAME} {ARGUMENTS}")), "no entry"),
    ],
)
def test_a_form_that_cannot_be_described_has_a_reason(source: str, reason: str) -> None:
    found = derive(ChatTemplate(source, {}))
    assert found.tools is None
    assert reason.replace("look_up", "probe_first") in found.reason


@pytest.mark.parametrize(
    "source",
    [
        "{{ tools }}{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{{ tools }}{% for a in range(9000) %}{{ messages }}{% endfor %}",
        TURN.replace("CALLS", ALL.replace("CALL", "<run>" + NAME + "{{ '({<[' * 900 }}" + ARGUMENTS)),
    ],
    ids=["endless", "long", "nested"],
)
def test_a_hostile_template_takes_little_time(source: str) -> None:
    begun_s = time.thread_time()
    derive(ChatTemplate(source, {}))
    assert time.thread_time() - begun_s < 4


def test_a_marker_in_the_words_about_tools_is_enough() -> None:
    """Granite 3.3 shows tools and no calls."""
    words = "{% if tools %}To call, answer <|tool_call|> and a list of {{ tools }}.{% endif %}"
    found = derive(ChatTemplate(words + "{% for m in messages %}{{ m.content }}{% endfor %}", {}))
    assert found.tool_format == "granite"


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        ({"<|im_end|>", "<|tool_call_start|>"}, "lfm2"),
        # Several formats begin so.
        ({"<tool_call>"}, None),
        (set(), None),
    ],
)
def test_a_token_tells_the_format_if_the_template_shows_no_calls(tokens: set[str], name: str | None) -> None:
    """LFM2's first templates show tools alone."""
    source = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert derive(ChatTemplate(source, {}), tokens).tool_format == name
    assert derive(ChatTemplate(source.replace("{{ tools }}", ""), {}), tokens).tool_format is None


def test_a_separate_template_for_tools_is_used(tmp_path: Path) -> None:
    (folder := folder_with(tmp_path, "", [])).joinpath("chat_template.jinja").unlink()
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": TEMPLATES["hermes"]}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    codec = TextCodec.load(folder)
    assert codec.chat_template is not None
    assert codec.chat_template.source == "D"
    assert codec.tool_template is not None
    assert codec.tool_template.source == TEMPLATES["hermes"]
    assert codec.shown.tool_format == "hermes"


def test_marks_of_the_turns_end_are_not_the_formats() -> None:
    calls = f"<calls>{ALL}</calls><|over|>".replace("CALL", f"<run={NAME}>{ARGUMENTS}</run>")
    form = derive(ChatTemplate(TURN.replace("CALLS", calls), {})).tools
    assert form is not None
    assert (form.opening, form.closing) == ("<calls>", "</calls>")


def test_a_section_for_each_call_may_hold_several() -> None:
    form = derive(ChatTemplate(TURN.replace("CALLS", OWN["tags around each call"]), {})).tools
    assert form is not None
    text = "<calls>\n<run=other>\n</run>\n<run=look_up>\n</run>\n</calls>"
    assert read(form, [text])[1] == [("other", {}), ("look_up", {})]


@pytest.mark.parametrize(("name", "space"), [("glm45", "\n"), ("glm47", "")])
def test_white_space_decides_among_entries(name: str, space: str) -> None:
    parameter = f"<arg_key>{{{{ k }}}}</arg_key>{space}<arg_value>{PLAIN}</arg_value>{space}"
    call = f"<tool_call>{NAME}{space}{EACH}</tool_call>{space}".replace("PARAMETER", parameter)
    assert derive(ChatTemplate(TURN.replace("CALLS", ALL.replace("CALL", call)), {})).tool_format == name


SHOWN = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}STARTTHOUGHTEND{% endif %}{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
).replace("THOUGHT", "{{ m.reasoning_content }}")
HIDDEN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>PROMPT{% endif %}"
)
SWITCHED = "{{ '<think>' if thinking else '</think>' }}"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (SHOWN.replace("START", "<think>\n").replace("END", "\n</think>\n\n"), "qwen3"),
        (SHOWN.replace("START", "[THINK]").replace("END", "[/THINK]"), "mistral"),
        (SHOWN.replace("START", "<|channel>thought\n").replace("END", "<channel|>"), "gemma4"),
        (HIDDEN.replace("PROMPT", ""), "qwen3"),
        (HIDDEN.replace(".split('</think>')[-1]", "").replace("PROMPT", "<think>\n"), "qwen3"),
        (HIDDEN.replace(".split('</think>')[-1]", "").replace("PROMPT", SWITCHED), "qwen3"),
        (HIDDEN.replace(".split('</think>')[-1]", "").replace("PROMPT", ""), None),
        (TURN, None),
        ("Think in <think></think>, answer in <response></response>." + TURN, "granite"),
        ("{{ '</think>' if false }}" + TURN, None),
    ],
)
def test_a_template_shows_its_thinking(source: str, name: str | None) -> None:
    found = derive(ChatTemplate(source, {}))
    assert found.thinking_format == name
    assert found.thinking == (THINKING_FORMATS[name] if name else None)


@pytest.mark.parametrize(
    "source",
    [
        SHOWN.replace("START", "<|muse|>").replace("END", "<|mused|>"),
        SHOWN.replace("START", "<muse>\n").replace("END", "\n</muse>\n\n"),
        SHOWN.replace("START", " to=self:").replace("END", "<|next|>"),
        SHOWN.replace("START", "")
        .replace("END", "\n[SO]\n")
        .replace("<|assistant|>{%", "<|assistant|>I muse:\n{%"),
    ],
)
def test_other_markers_of_thinking_are_found(source: str) -> None:
    template = ChatTemplate(source, {})
    found = derive(template)
    assert found.thinking_format is None
    assert thought_and_answer(template, found) == ("So be it.", "Yes.<|end|>")


def thought_and_answer(template: ChatTemplate, found: Derived) -> tuple[str, str]:
    """Returns the thought and the answer that are read in a turn of the template."""
    assert found.thinking is not None
    thought = dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "So be it.")
    turn = {"role": "assistant", "content": "Yes.", **thought}
    on: dict[str, Any] = {name: True for name in SWITCHES if name in template.variables}
    prompt = template.render([QUESTION], add_generation_prompt=True, variables=on)
    whole = template.render([QUESTION, turn], add_generation_prompt=False, variables=on)
    common = next((at for at, (a, b) in enumerate(zip(whole, prompt, strict=False)) if a != b), len(prompt))
    # A template may leave a text of the prompt out of the turn.
    parser = ThinkParser(thinking_at(found.thinking, prompt, variables=on), found.thinking)
    events = [event for char in whole[common:] for event in parser.feed(char)] + parser.finish()
    thoughts = "".join(event.text for event in events if isinstance(event, Reasoning))
    return thoughts.strip(), "".join(event.text for event in events if isinstance(event, Text)).strip()


@pytest.fixture(scope="module")
def templates() -> dict[str, str]:
    try:
        return trl_templates()
    except IndexUnreachable as error:
        pytest.skip(f"the package index with trl cannot be reached: {error}")


TRL = json.loads(FOUND.read_text())["trl"]
# They show no thoughts.
THOUGHTLESS = {"gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4"} | {
    name for name in TRL if name.startswith("deepseek")
}


@pytest.mark.parametrize("name", TRL)
def test_templates_of_trl_show_the_formats_in_the_documentation(templates: dict[str, str], name: str) -> None:
    """A call or a thought that such a template writes is read as the same."""
    assert formats_of(templates[name]) == TRL[name]
    template = ChatTemplate(templates[name], SPECIAL_TOKENS)
    found = derive(template)
    if found.thinking is not None and name not in THOUGHTLESS:
        thought, content = thought_and_answer(template, found)
        assert (thought, content.partition("<")[0]) == ("So be it.", "Yes.")
    if (form := found.tools) is None:
        return
    # The templates of LFM2 escape nothing in texts, and those of Llama 3 refuse several calls.
    calls: list[tuple[str, dict[str, Any]]] = [
        ("look_up", {"word": "a < b & c", "count": 2, "options": {"exact": True, "in": ["x, y", -0.5]}}),
        ("other", {"word": "5"}),
    ]
    for some in [calls[:1], calls[1:], *([] if form is FORMATS["llama3_json"] else [calls])]:
        text = answer(template, some, found.arguments_as_text)
        for size in (len(text), 1):
            assert read(form, (text[at : at + size] for at in range(0, len(text), size)))[1] == some
