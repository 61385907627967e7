"""The parsers of tool calls and of thinking: vLLM's names, and ours."""

from typing import Final

from gateway.format_names import REASONING_FORMATS, TOOL_FORMATS, VLLM_PREFIX

TOOL_PARSERS: Final = frozenset({
    "apertus", "cohere_command3", "cohere_command4", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4",
    "deepseek_v41", "dots", "ernie45", "functiongemma", "gemma4", "gigachat3", "glm45", "glm47", "granite",
    "granite-20b-fc", "granite4", "hermes", "hf", "hunyuan_a13b", "hy_v3", "hy_v4", "inkling", "internlm", "jamba",
    "k2_horizon", "kimi_k2", "kimi_k3", "lfm2", "ling3", "llama3_json", "llama4_json", "llama4_pythonic", "longcat",
    "mimo", "minicpm5", "minimax_m2", "minimax_m3", "mistral", "muse_glimmer", "olmo3", "openai", "phi4_mini_json",
    "plamo3", "poolside_v1", "pythonic", "qwen3_coder", "qwen3_json", "qwen3_xml", "seed_oss", "step3", "step3p5",
    "xlam",
})  # fmt: skip
"""vLLM's parsers of tool calls."""

REASONING_PARSERS: Final = frozenset({
    "cohere_command3", "cohere_command4", "deepseek_r1", "deepseek_v3", "deepseek_v4", "deepseek_v41", "ernie45",
    "gemma4", "glm45", "glm47", "granite", "granite_thinking_parser", "hf", "holo2", "hunyuan_a13b", "hy_v3",
    "hy_v4", "inkling", "k2_horizon", "kimi_k2", "kimi_k3", "ling3", "mimo", "minicpmv", "minimax_m2",
    "minimax_m2_append_think", "minimax_m3", "mistral", "muse_glimmer", "nemotron_v3", "olmo3", "openai_gptoss",
    "plamo3", "poolside_v1", "qwen3", "seed_oss", "step3", "step3p5",
})  # fmt: skip
"""vLLM's parsers of thinking."""


def tool_parser(name: str) -> list[str]:
    """Converts the name of a tool parser; a name that is vLLM's alone stays vLLM's parser."""
    return [f"--tool-call-parser={_converted(name, TOOL_PARSERS - set(TOOL_FORMATS))}"]


def reasoning_parser(name: str) -> list[str]:
    """Converts the name of a reasoning parser."""
    return (
        [f"--reasoning-parser={_converted(name, REASONING_PARSERS - set(REASONING_FORMATS))}"] if name else []
    )


def _converted(name: str, theirs: frozenset[str]) -> str:
    return f"{VLLM_PREFIX}{name}" if name in theirs else name
