"""Our grammars of tool calls against those that xgrammar has for the same models, on written examples."""

import functools
from typing import Any, Final

import pytest

from gateway.parsers.formats import FORMATS
from gateway.parsers.writing import Call, write
from gateway.tools.grammar import Callee, optional, required, structural
from tests.support.gateway.tool_requests import accepts

xgrammar = pytest.importorskip("xgrammar", reason="vLLM, which the worker needs, installs it")
testing = pytest.importorskip("xgrammar.testing")

WEATHER: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    },
    "required": ["city"],
}
TOOLS: Final = {"get_weather": WEATHER, "get_time": {"type": "object", "properties": {}}}
FULL = Call("get_weather", {"city": 'a "b" \\ <c> & é', "days": 3, "tags": ["x"], "where": {"x": 1.5}})
PARIS = Call("get_weather", {"city": "Paris"})
EXAMPLES: Final[dict[str, list[Call]]] = {
    "one": [PARIS],
    "full": [FULL],
    "two": [PARIS, FULL],
    "empty": [Call("get_time", {})],
    "missing": [Call("get_weather", {"days": 3})],
    "wrong type": [Call("get_weather", {"city": "Paris", "days": ["x"]})],
    "wrong inside": [Call("get_weather", {"city": "Paris", "where": {"x": "y"}})],
    "unlisted": [Call("get_weather", {"city": "Paris", "country": "F"})],
    "unknown tool": [Call("other", {"city": "Paris"})],
}
EMPTY: Final = {"empty"}
# Their name and our format, the texts that they write around the calls, and examples that ours alone accepts.
MODELS: Final[dict[str, tuple[str, str, str, set[str]]]] = {
    # Without a marker, only a name of the tools makes a call.
    "llama": ("llama3_json", "", "", {"unknown tool"}),
    "qwen_3": ("hermes", "", "", set()),
    # Theirs writes an empty line into a call without arguments, unlike Qwen's template.
    "qwen_3_5": ("qwen3_coder", "", "", EMPTY),
    "qwen_3_coder": ("qwen3_coder", "", "", EMPTY),
    "deepseek_r1": ("deepseek_v3", "", "", set()),
    "deepseek_v3_1": ("deepseek_v31", "", "", set()),
    "deepseek_v3_2": ("deepseek_v32", "\n\n", "", set()),
    "deepseek_v4": ("deepseek_v4", "\n\n", "", set()),
    "kimi": ("kimi_k2", "", "", set()),
    "kimi_k3": ("kimi_k3", "<|close|>response<|sep|>", "<|close|>message<|sep|>", set()),
    "minimax": ("minimax_m2", "\n</think>\n\n\n\n\n", "", set()),
    # Theirs lacks the line break before the end of a call without arguments.
    "minimax_m3": ("minimax_m3", "", "", EMPTY),
    "glm_4_7": ("glm47", "", "", set()),
}
# Not compared: mimo and exaone lack the line breaks of our entries, cohere is the format of a later model,
# and harmony's frame differs in every message.


@functools.cache
def theirs(model: str, choice: str) -> Any:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in TOOLS.items()
    ]
    tag = xgrammar.get_model_structural_tag(model, tools=tools, tool_choice=choice, reasoning="disabled")
    return xgrammar.Grammar.from_structural_tag(tag)


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("model", MODELS)
def test_grammars_agree(model: str, choice: str) -> None:
    name, before, after, ours_alone = MODELS[model]
    if choice == "required":
        # An answer of calls alone is no free text.
        ours_alone = ours_alone - {"unknown tool"}
    form, callees = FORMATS[name], [Callee(*tool) for tool in TOOLS.items()]
    write_tag = required if choice == "required" else optional
    ours = structural(write_tag(form, callees, parallel=True))
    verdicts = {}
    for example, calls in EXAMPLES.items():
        text = write(form, calls)
        whole = before + text + after
        verdicts[example] = (
            accepts(ours, text),
            testing._is_grammar_accept_string(theirs(model, choice), whole),
        )
    assert {example for example, (first, second) in verdicts.items() if first and not second} == ours_alone
    assert not [example for example, (first, second) in verdicts.items() if second and not first]
