"""Which format a model writes its calls in, seen from how its chat template writes one."""

import re
from typing import Any, Final

from gateway.parsers.reasoning import END
from gateway.text.chat_template import ChatTemplate
from protos.errors import InvalidArgument

_NAME: Final = "probe_function"
_PROBE: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": "probe"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                # Nine letters or digits: Mistral's templates refuse others.
                "id": "probe0000",
                "type": "function",
                "function": {"name": _NAME, "arguments": {"probe_argument": "probe_value"}},
            }
        ],
    },
]
_TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "probe",
            "parameters": {"type": "object", "properties": {"probe_argument": {"type": "string"}}},
        },
    }
]

# What a call looks like, and what must stand in front of it: other formats have JSON of the same kind behind markers of their own.
_LOOKS: Final = [
    ("hermes", re.compile(r'<tool_call>\s*\{"name": ?"probe_function", ?"arguments": ?\{"probe')),
    ("mistral_v13", re.compile(r"\[TOOL_CALLS\] ?probe_function(?:\[CALL_ID\]probe0000)?\[ARGS\] ?\{")),
    ("mistral_v11", re.compile(r"\[TOOL_CALLS\] ?probe_function ?\{")),
    ("mistral", re.compile(r'\[TOOL_CALLS\] ?\[ ?\{"name": ?"probe_function", ?"arguments": ?\{')),
    (
        "llama3_json",
        re.compile(
            r"(?:<\|(?:python_tag|end_header_id|header_end)\|>)\s*"
            r'\{(?:"type": ?"function", ?)?"name": ?"probe_function", ?"parameters": ?\{'
        ),
    ),
    (
        "pythonic",
        re.compile(
            r"(?:<\|(?:end_header_id|header_end|python_start)\|>)\s*\[probe_function\(probe_argument=[\"']probe"
        ),
    ),
]


def tool_format(template: ChatTemplate | None) -> str | None:
    """The format's name, or ``None`` where the template does not tell."""
    if template is None or not template.knows_tools:
        return None
    try:
        text = template.render(_PROBE, add_generation_prompt=False, tools=_TOOLS)
    except InvalidArgument:
        return None
    return next((name for name, look in _LOOKS if look.search(text)), None)


def thinks(template: ChatTemplate | None) -> bool:
    """Whether the template knows thinking between markers."""
    return template is not None and END in template.source
