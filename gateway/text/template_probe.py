"""Finds out from a chat template how the model writes tool calls, and whether it thinks.

The probe renders a conversation with a tool call and looks at how the template writes the call.
"""

import re
from typing import Any, Final

from gateway.format_names import ToolFormat
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
                # Nine letters or digits: Mistral's templates refuse other ids.
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

# Ends the thinking of every format in which templates show it.
_THINKING_END: Final = "</think>"

# How each format writes the probe's call. Patterns include the text in front of a call, because formats share
# their JSON and differ in their markers.
_PATTERNS: Final[list[tuple[ToolFormat, re.Pattern[str]]]] = [
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


def tool_format(template: ChatTemplate | None) -> ToolFormat | None:
    """Returns the format in which ``template`` writes tool calls; ``None`` if it shows no known format."""
    if template is None or not template.knows_tools:
        return None
    try:
        text = template.render(_PROBE, add_generation_prompt=False, tools=_TOOLS)
    except InvalidArgument:
        return None
    return next((name for name, pattern in _PATTERNS if pattern.search(text)), None)


def thinks(template: ChatTemplate | None) -> bool:
    """Whether ``template`` handles thinking between ``<think>`` and ``</think>``."""
    return template is not None and _THINKING_END in template.source
