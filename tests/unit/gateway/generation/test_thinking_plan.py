"""How the thinking in front of an answer is read: by setting, template, prompt and request."""

from typing import Any

import pytest

from gateway.generation.answer_plan import plan_answer
from gateway.openai.chat import CollectedMessage
from gateway.parsers.reasoning import THINKING_ALIASES, THINKING_FORMATS
from gateway.scheduler_client.served_model import ServedModel
from tests.support.gateway.tool_requests import USER, accepts, chat, settings
from tests.support.gateway.tool_templates import TIME

CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
CODER_CALL = "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"


def answer(served: ServedModel, text: str, chosen: dict[str, Any], *, prompt: str = "", **fields: Any) -> Any:
    """Returns the message of an answer with ``text``, the same however it is streamed."""
    ids = served.text.encode(prompt or "<|im_start|>assistant\n", add_special_tokens=False)
    plan = plan_answer(settings(**chosen), served, chat(**fields), ids)

    def body(pieces: list[str]) -> Any:
        reader = plan.reader()
        events = [event for piece in pieces for event in reader.feed(piece)]
        found = CollectedMessage.from_events([*events, *reader.finish()]).body(with_reasoning=True)
        for call in found.get("tool_calls", ()):
            call["id"] = ""
        return found

    whole = body([text])
    assert all(body([text[:at], text[at:]]) == whole for at in range(1, len(text)))
    return whole


@pytest.mark.parametrize(
    ("name", "variables", "text", "reasoning", "content"),
    [
        ("deepseek_v3", {"thinking": True}, "Hm.</think>Ok.", "Hm.", "Ok."),
        ("deepseek_v3", {}, "Hello.", None, "Hello."),
        ("gemma4", {"enable_thinking": True}, "<|channel>thought\nHm.<channel|>Ok.", "Hm.", "Ok."),
        ("kimi_k2", {"thinking": False}, "Hello.", None, "Hello."),
        ("kimi_k2", {}, "Hm.</think>Hello.", "Hm.", "Hello."),
    ],
)
def test_the_requests_variables_decide_where_the_prompt_does_not(
    smollm2: ServedModel, name: str, variables: dict[str, Any], text: str, reasoning: str | None, content: str
) -> None:
    chosen = {"reasoning_parser": THINKING_ALIASES.get(name, name)}
    body = answer(smollm2, text, chosen, chat_template_kwargs=variables)
    assert (body["reasoning"], body["content"]) == (reasoning, content)
    # The deployment's values count, too, and the request's come before them.
    body = answer(smollm2, text, {**chosen, "default_chat_template_kwargs": variables})
    assert (body["reasoning"], body["content"]) == (reasoning, content)


@pytest.mark.parametrize(
    ("effort", "content"), [("none", "Hm.</think>Ok."), ("low", "Ok."), (None, "Hm.</think>Ok.")]
)
def test_an_effort_switches_the_thinking(smollm2: ServedModel, effort: str | None, content: str) -> None:
    chosen = {"reasoning_parser": "deepseek_v3", "default_chat_template_kwargs": {}}
    assert answer(smollm2, "Hm.</think>Ok.", chosen, reasoning_effort=effort)["content"] == content


@pytest.mark.parametrize("parser", ["auto", "qwen3", "deepseek_r1"])
@pytest.mark.parametrize(("form", "call"), [("hermes", CALL), ("qwen3_coder", CODER_CALL)])
def test_a_call_ends_an_open_thought(qwen: ServedModel, parser: str, form: str, call: str) -> None:
    """No ``</think>`` is needed."""
    chosen = {"reasoning_parser": parser, "tool_call_parser": form}
    opened = "<|im_start|>assistant\n<think>\n"
    body = answer(qwen, f"I need it.\n{call}", chosen, prompt=opened, tools=[TIME])
    assert (body["reasoning"], body["content"]) == ("I need it.", None)
    assert [call["function"]["name"] for call in body["tool_calls"]] == ["get_time"]
    # Without tools, the text is no call.
    body = answer(qwen, f"I need it.\n{call}", chosen, prompt=opened)
    assert (body["reasoning"], body["content"]) == (f"I need it.\n{call}", None)


@pytest.mark.parametrize("parser", ["auto", "qwen3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("begun", "text", "reasoning", "content"),
    [
        ("<think>\nLet me see,", " 4.\n</think>\n\n4", "4.", "4"),
        ("<think>\nSo 4.\n</think>\n\nIt is", " 4.</think>", None, " 4.</think>"),
        ("It is", " 4.", None, " 4."),
    ],
)
def test_a_continued_turn_goes_on_in_its_thought(
    qwen: ServedModel, parser: str, begun: str, text: str, reasoning: str | None, content: str
) -> None:
    body = answer(
        qwen,
        text,
        {"reasoning_parser": parser},
        prompt=f"<|im_start|>assistant\n{begun}",
        messages=[*USER, {"role": "assistant", "content": begun}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert (body["reasoning"], body["content"]) == (reasoning, content)


def test_without_a_format_markers_are_text(qwen: ServedModel) -> None:
    chosen = {"reasoning_parser": "none", "tool_call_parser": "qwen3_coder"}
    text = "Hm.\n</think>\n\nA"
    assert answer(qwen, text, chosen, tools=[TIME])["content"] == text
    assert answer(qwen, text, chosen)["content"] == text


def test_older_turns_do_not_end_the_thinking(smollm2: ServedModel) -> None:
    prompt = "<think>Hm.</think>Yes.<|im_end|>\n<|im_start|>assistant\n"
    for text in ("<think>So.</think>No.", "So.</think>No."):
        body = answer(smollm2, text, {"reasoning_parser": "deepseek_r1"}, prompt=prompt)
        assert (body["reasoning"], body["content"]) == ("So.", "No.")


def test_texts_around_the_answer_are_dropped_without_tools(smollm2: ServedModel) -> None:
    text = "<|open|>response<|sep|>Hello.<|close|>response<|sep|><|close|>message<|sep|>"
    for prompt in ("", "x<|open|>response<|sep|>"):
        written = text.removeprefix("<|open|>response<|sep|>") if prompt else text
        assert answer(smollm2, written, {"reasoning_parser": "kimi_k3"}, prompt=prompt)["content"] == "Hello."


@pytest.mark.parametrize("name", THINKING_FORMATS)
def test_a_grammar_allows_the_formats_thinking(smollm2: ServedModel, name: str) -> None:
    """What the grammar accepts, the parser reads as thinking and the constrained answer."""
    form, chosen = THINKING_FORMATS[name], {"reasoning_parser": name}
    asked = chat(structured_outputs={"regex": "[ab]{3}"}, chat_template_kwargs={"thinking": True})
    for opened in (False, True):
        prompt = f"x{form.start}" if opened else "x"
        ids = smollm2.text.encode(prompt, add_special_tokens=False)
        plan = plan_answer(settings(**chosen), smollm2, asked, ids)
        assert plan.constraint is not None
        start = "" if opened else form.start
        for begin, end in (("", ""), *form.answer):
            text = f"{start}Hm.{form.end}\n{begin}aba{end}"
            assert accepts(plan.constraint, text)
            body = CollectedMessage.from_events(plan.reader().whole(text)).body(with_reasoning=True)
            assert (body["reasoning"], body["content"]) == ("Hm.", "aba")
            assert not accepts(plan.constraint, f"{start}Hm.{form.end}{begin}abc{end}")
        assert not accepts(plan.constraint, f"{start}aba")
