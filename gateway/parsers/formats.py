"""The formats in which models write tool calls, as data: one entry per family, by vLLM's names.

An entry holds the texts around calls exactly as chat templates write them. The same entry is read by
:mod:`gateway.parsers.machine`, which tolerates other white space around the markers, and written as a grammar
by :mod:`gateway.tools.grammar`, which does not. CONTRIBUTING.md shows how to add an entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A call is a JSON object: ``{"name": "f", "arguments": {…}}``."""

    name: str = "name"
    """Key of the function's name."""
    arguments: tuple[str, ...] = ("arguments", "parameters")
    """Keys of the arguments; the first is written."""
    first: str = ""
    """Members written before the name, with their comma."""


@dataclass(frozen=True, slots=True)
class NamedJson:
    """A call is a name and a JSON object: ``f[ARGS]{…}``."""

    between: str = ""
    """Between the name, or the id, and the arguments; may be missing."""
    id_mark: str = ""
    """Between the name and an id that the model may write."""
    prefix: str = ""
    """Before the name; may be missing."""
    id_is_number: bool = False
    """Whether the id is a number to which the name belongs, as in ``functions.f:0``; else a word."""


@dataclass(frozen=True, slots=True)
class Tagged:
    """A call is a name and parameters between tags. Values are plain text, typed by the tool's schema."""

    name_end: str
    """After the name."""
    key: str
    """Before a parameter's name."""
    key_end: str
    """After a parameter's name, before its value."""
    value_end: str
    """After a parameter's value. A line break next to a value belongs to the tags."""
    json_key_ends: tuple[str, ...] = ()
    """Other texts in place of ``key_end``, after which the value is JSON whatever the schema says; then
    ``key_end`` announces plain text."""


@dataclass(frozen=True, slots=True)
class Python:
    """A call is a Python call with keyword literals: ``f(a=1)``."""


@dataclass(frozen=True, slots=True)
class LooseObject:
    """A call is a name and an object without quoted keys: ``call:f{a:1,b:<|"|>text<|"|>}``."""

    quote: str
    """Around texts."""


@dataclass(frozen=True, slots=True)
class Elements:
    """A call is a name and nested elements named after the parameters: ``<a>1</a>``."""

    name_end: str
    """After the name."""
    prefix: str
    """Before each element's tags."""


CallForm: TypeAlias = JsonObject | NamedJson | Tagged | Python | LooseObject | Elements
CallIds: TypeAlias = Literal["call", "short", "indexed"]


@dataclass(frozen=True, slots=True)
class Format:
    """How a family of models writes calls.

    In the order of an answer: ``opening``, ``begin``, the call, ``end``, ``separator``, ``begin``, a call,
    ``end``, ``closing``. In any text, ``{0}`` and ``{1}`` are the number of the call, counted from there.
    """

    call: CallForm
    begin: str = ""
    """Before each call, up to its name or object."""
    end: str = ""
    """After each call; may be missing where another marker or the answer's end follows."""
    opening: str = ""
    """Before the first call."""
    closing: str = ""
    """After the last call; may be missing at the answer's end."""
    separator: str = ""
    """Between two calls."""
    wraps_each: bool = False
    """Whether ``opening`` and ``closing`` surround each call of several."""
    listed: bool = False
    """Whether the calls stand in brackets within ``opening`` and ``closing``, as a list."""
    bare: bool = False
    """Whether calls of the request's tools may begin an answer without a marker."""
    also: tuple[str, ...] = ()
    """Other texts in place of ``opening``, for reading."""
    also_closing: tuple[str, ...] = ()
    """Other texts in place of ``closing``, for reading."""
    also_call: CallForm | None = None
    """Another form of a call, for reading."""
    ids: CallIds = "call"
    """Form of ids: OpenAI's, nine letters and digits (Mistral's templates accept no other), or
    ``functions.NAME:N`` (Kimi's)."""

    @property
    def trigger(self) -> str:
        """The marker that begins calls in free text; empty without one."""
        return (self.opening or self.begin).strip()

    def texts(self) -> tuple[str, ...]:
        """Returns all texts that may contain special tokens of the tokenizer."""
        fields = (self.begin, self.end, self.opening, self.closing, *self.also, *self.also_closing)
        call = (getattr(self.call, name) for name in self.call.__slots__)
        own = (text for value in call for text in (value if isinstance(value, tuple) else (value,)))
        return tuple(text for text in (*fields, *own) if isinstance(text, str) and text)


def _functions(call: Tagged, opening: str, closing: str) -> Format:
    """Returns Qwen's markup, between an opening and a closing of a family's own."""
    return Format(
        call,
        opening=f"{opening}\n",
        begin="<function=",
        end="</function>\n",
        closing=closing,
        separator="\n",
        wraps_each=True,
    )


def _dsml(section: str) -> Format:
    """Returns DeepSeek's markup with the calls in ``section``."""
    mark = "｜DSML｜"
    return Format(
        Tagged(
            name_end='">\n',
            key=f'<{mark}parameter name="',
            key_end='" string="true">',
            json_key_ends=('" string="false">',),
            value_end=f"</{mark}parameter>\n",
        ),
        opening=f"<{mark}{section}>\n",
        begin=f'<{mark}invoke name="',
        end=f"</{mark}invoke>\n",
        closing=f"</{mark}{section}>",
    )


def _deepseek(before: str, between: str, after: str, separator: str = "") -> Format:
    """Returns the older form of DeepSeek, with JSON arguments."""
    return Format(
        NamedJson(between),
        opening="<｜tool▁calls▁begin｜>",
        begin=f"<｜tool▁call▁begin｜>{before}",
        end=f"{after}<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
        separator=separator,
    )


def _json_list(opening: str, closing: str = "") -> Format:
    """Returns a list of JSON objects between two markers."""
    return Format(JsonObject(), opening=opening, closing=closing, separator=", ", listed=True)


FORMATS: Final[Mapping[str, Format]] = MappingProxyType(
    {
        "hermes": Format(JsonObject(), begin="<tool_call>\n", end="\n</tool_call>", separator="\n"),
        "qwen3_coder": _functions(
            Tagged(name_end=">\n", key="<parameter=", key_end=">\n", value_end="\n</parameter>\n"),
            "<tool_call>",
            "</tool_call>",
        ),
        "seed_oss": _functions(
            Tagged(name_end=">\n", key="<parameter=", key_end=">", value_end="</parameter>\n"),
            "<seed:tool_call>",
            "</seed:tool_call>",
        ),
        "mimo": _functions(
            Tagged(name_end=">\n", key="<parameter=", key_end=">", value_end="</parameter>\n"),
            "<tool_call>",
            "</tool_call>",
        ),
        "glm45": Format(
            Tagged(
                name_end="\n",
                key="<arg_key>",
                key_end="</arg_key>\n<arg_value>",
                value_end="</arg_value>\n",
            ),
            begin="<tool_call>",
            end="</tool_call>",
            separator="\n",
        ),
        "glm47": Format(
            Tagged(name_end="", key="<arg_key>", key_end="</arg_key><arg_value>", value_end="</arg_value>"),
            begin="<tool_call>",
            end="</tool_call>",
        ),
        "minimax_m2": Format(
            Tagged(name_end='">\n', key='<parameter name="', key_end='">', value_end="</parameter>\n"),
            opening="<minimax:tool_call>\n",
            begin='<invoke name="',
            end="</invoke>\n",
            closing="</minimax:tool_call>",
        ),
        "minimax_m3": Format(
            Elements(name_end='">\n', prefix="]<]minimax[>["),
            opening="]<]minimax[>[<tool_call>\n",
            begin=']<]minimax[>[<invoke name="',
            end="]<]minimax[>[</invoke>\n",
            closing="]<]minimax[>[</tool_call>",
        ),
        "kimi_k2": Format(
            NamedJson("<|tool_call_argument_begin|>", id_mark=":", prefix="functions.", id_is_number=True),
            opening="<|tool_calls_section_begin|>",
            begin="<|tool_call_begin|>",
            end="<|tool_call_end|>",
            closing="<|tool_calls_section_end|>",
            ids="indexed",
        ),
        "kimi_k3": Format(
            Tagged(
                name_end='" index="{1}"<|sep|>',
                key='<|open|>argument key="',
                key_end='" type="string"<|sep|>',
                json_key_ends=tuple(
                    f'" type="{kind}"<|sep|>'
                    for kind in ("number", "integer", "boolean", "null", "object", "array")
                ),
                value_end="<|close|>argument<|sep|>",
            ),
            opening="<|open|>tools<|sep|>",
            begin='<|open|>call tool="',
            end="<|close|>call<|sep|>",
            closing="<|close|>tools<|sep|>",
        ),
        "deepseek_v3": _deepseek("function<｜tool▁sep｜>", "\n```json\n", "\n```", separator="\n"),
        "deepseek_v31": _deepseek("", "<｜tool▁sep｜>", ""),
        "deepseek_v32": _dsml("function_calls"),
        "deepseek_v4": _dsml("tool_calls"),
        "gemma4": Format(LooseObject('<|"|>'), begin="<|tool_call>call:", end="<tool_call|>"),
        "hunyuan": _json_list("<tool_calls>", "</tool_calls>"),
        "granite": _json_list("<|tool_call|>"),
        "phi4_mini": _json_list("functools"),
        "cohere": Format(
            JsonObject("tool_name", ("parameters",), first='"tool_call_id": "{0}", '),
            opening="<|START_ACTION|>",
            closing="<|END_ACTION|>",
            separator=", ",
            listed=True,
        ),
        "internlm": Format(
            JsonObject(arguments=("parameters", "arguments")),
            begin="<|action_start|><|plugin|>\n",
            end="<|action_end|>",
            separator="\n",
        ),
        "xlam": Format(
            JsonObject(),
            separator=", ",
            listed=True,
            bare=True,
            also=("[TOOL_CALLS]", "<tool_call>", "```json"),
            also_closing=("</tool_call>", "```"),
        ),
        "llama3_json": Format(
            JsonObject(arguments=("parameters", "arguments")),
            separator="; ",
            bare=True,
            also=("<|python_tag|>",),
        ),
        "mistral": Format(
            JsonObject(),
            opening="[TOOL_CALLS]",
            separator=", ",
            listed=True,
            also_call=NamedJson("[ARGS]", id_mark="[CALL_ID]"),
            ids="short",
        ),
        "mistral_v11": Format(
            NamedJson(), begin="[TOOL_CALLS]", also_call=NamedJson("[ARGS]", id_mark="[CALL_ID]"), ids="short"
        ),
        "mistral_v13": Format(NamedJson("[ARGS]", id_mark="[CALL_ID]"), begin="[TOOL_CALLS]", ids="short"),
        "pythonic": Format(
            Python(),
            separator=", ",
            listed=True,
            bare=True,
            also=("<|python_start|>",),
            also_closing=("<|python_end|>",),
        ),
        "llama4_pythonic": Format(
            Python(),
            opening="<|python_start|>",
            closing="<|python_end|>",
            separator=", ",
            listed=True,
            bare=True,
        ),
        "lfm2": Format(
            Python(),
            opening="<|tool_call_start|>",
            closing="<|tool_call_end|>",
            separator=", ",
            listed=True,
        ),
        "olmo3": Format(
            Python(), opening="<function_calls>", closing="</function_calls>", separator="\n", bare=True
        ),
    }
)
"""By vLLM's names."""

ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "qwen3_xml": "qwen3_coder",
        "step3p5": "qwen3_coder",
        "nemotron_v3": "qwen3_coder",
        "qwen3_json": "hermes",
        "granite4": "hermes",
        "ernie45": "hermes",
        "exaone4": "hermes",
        "hunyuan_a13b": "hunyuan",
        "jamba": "hunyuan",
        "phi4_mini_json": "phi4_mini",
        "cohere_command3": "cohere",
        "llama4_json": "llama3_json",
    }
)
"""Other names of the same formats."""

LIST: Final = Format(
    JsonObject(arguments=("parameters", "arguments")), separator=", ", listed=True, bare=True
)
"""A JSON list that is the whole answer, as in vLLM: for models without a format of their own."""
