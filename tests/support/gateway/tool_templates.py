"""Chat templates that write tool calls as well-known models do, and tokenizer folders with them."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from tests.support.gateway.serving import FILES, smollm2_folder

_CHATML: Final = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA: Final = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}{% set c = m.tool_calls[0] %}CALL"
    "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
)
_MISTRAL: Final = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}{% endfor %}CALL</s>"
    "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
_ARGUMENTS: Final = "{{ c.function.arguments | tojson }}"
_NAME: Final = "{{ c.function.name }}"

# By the format that each template shows.
TEMPLATES: Final[dict[str, str]] = {
    "hermes": _CHATML.replace(
        "CALL", f'\n<tool_call>\n{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}\n</tool_call>'
    ),
    "llama3_json": _LLAMA.replace("CALL", f'{{"name": "{_NAME}", "parameters": {_ARGUMENTS}}}'),
    "mistral": _MISTRAL.replace(
        "CALL",
        f'[TOOL_CALLS] [{{% for c in m.tool_calls %}}{{"name": "{_NAME}", "arguments": {_ARGUMENTS}, "id": "{{{{ c.id }}}}"}}{{% if not loop.last %}}, {{% endif %}}{{% endfor %}}]',
    ),
    "mistral_v11": _MISTRAL.replace(
        "CALL", f"{{% for c in m.tool_calls %}}[TOOL_CALLS]{_NAME}{_ARGUMENTS}{{% endfor %}}"
    ),
    "mistral_v13": _MISTRAL.replace(
        "CALL",
        f"{{% for c in m.tool_calls %}}[TOOL_CALLS]{_NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{_ARGUMENTS}{{% endfor %}}",
    ),
    "pythonic": _LLAMA.replace(
        "CALL",
        f"[{_NAME}({{% for key, value in c.function.arguments.items() %}}{{{{ key }}}}={{{{ value | tojson }}}}{{% if not loop.last %}}, {{% endif %}}{{% endfor %}})]",
    ),
}

THINKING: Final = TEMPLATES["hermes"].replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% elif opened %}<think>\n{% endif %}{% endif %}",
)

# As gpt-oss writes turns; a call's recipient stands before its channel.
HARMONY: Final = (
    "{% if tools %}<|start|>developer<|message|># Tools{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    f"<|start|>assistant to=functions.{_NAME}<|channel|>commentary json<|message|>{_ARGUMENTS}<|call|>"
    "{% endfor %}{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

MARKERS: Final = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def folder_with(path: Path, template: str = THINKING, special_tokens: Sequence[str] = MARKERS) -> Path:
    """Fills ``path`` with SmolLM2's tokenizer files, another template and further special tokens."""
    for name in FILES:
        shutil.copy(smollm2_folder() / name, path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(template)
    return path


WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME: Final[dict[str, Any]] = {"type": "function", "function": {"name": "get_time"}}
