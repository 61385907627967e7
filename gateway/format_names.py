"""Names of the formats in which models write tool calls and thinking."""

from typing import Final, Literal, TypeAlias, get_args

ToolFormat: TypeAlias = Literal["hermes", "llama3_json", "mistral", "mistral_v11", "mistral_v13", "pythonic"]
"""A format of tool calls; ``gateway.tools.formats.FORMATS`` has its parser and its grammar."""

TOOL_FORMATS: Final[tuple[ToolFormat, ...]] = get_args(ToolFormat)

REASONING_FORMATS: Final = ("qwen3", "deepseek_r1")
"""Ways in which models mark their thinking."""

VLLM_PREFIX: Final = "vllm:"
"""Begins a setting that names a parser of an installed vLLM instead."""
