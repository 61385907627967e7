"""How vLLM's compilation configuration becomes ours."""

import ast
import contextlib
import json
from typing import Any, Final

# vLLM's modes of compilation, whose numbers are levels.
_MODES = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")
_COMPILATION_KEYS = {
    "level": "level",
    "mode": "level",
    "compile_sizes": "candidate_compile_sizes",
    "candidate_compile_sizes": "candidate_compile_sizes",
}

VLLM_KEYS: Final = frozenset({
    "backend", "cache_dir", "compile_cache_save_format", "compile_mm_encoder", "compile_ranges_endpoints",
    "cudagraph_capture_sizes", "cudagraph_copy_inputs", "cudagraph_decoder_replay", "cudagraph_mm_encoder",
    "cudagraph_mode", "cudagraph_num_of_warmups", "cudagraph_specialize_lora", "custom_ops", "debug_dump_path",
    "decoder_replay_cudagraph_capture_sizes", "decoder_replay_trim_threshold", "dynamic_shapes_config",
    "encoder_cudagraph_max_frames_per_batch", "encoder_cudagraph_max_vision_items_per_batch",
    "encoder_cudagraph_token_budgets", "fast_moe_cold_start", "inductor_compile_config", "inductor_passes",
    "ir_enable_torch_wrap", "max_cudagraph_capture_size", "pass_config", "splitting_ops",
    "use_inductor_graph_partition",
})  # fmt: skip
"""The keys about vLLM's own compiler, which have no effect here."""


def optimization_level(text: str) -> list[str]:
    """Converts `-O`, which once took the whole compilation configuration."""
    if not text.lstrip().startswith("{"):
        return [f"--optimization-level={text}"]
    return [f"--optimization-level={text}"] if _is_ours(_literal(text)) else compilation_config(text)


def compilation_config(text: str) -> list[str]:
    """Converts the compilation configuration; keys about vLLM's own compiler have no effect."""
    read: Any = _literal(text)
    if not isinstance(read, dict) or _is_ours(read):
        return [f"--compilation-config={text}"]
    if unknown := [name for name in read if name not in {*_COMPILATION_KEYS, *VLLM_KEYS}]:
        raise ValueError(f"has no key {unknown[0]!r}; level and candidate_compile_sizes have an effect here")
    kept = {ours: read[name] for name, ours in _COMPILATION_KEYS.items() if name in read}
    if isinstance(level := kept.get("level"), str):
        if level.upper() not in _MODES:
            raise ValueError(f"should have a mode of {', '.join(_MODES)}")
        kept["level"] = _MODES.index(level.upper())
    kept = {name: value for name, value in kept.items() if value is not None}
    return [f"--compilation-config={json.dumps(kept)}"] if kept else []


def _is_ours(read: object) -> bool:
    """Returns whether a compilation configuration has nothing but our own keys."""
    return isinstance(read, dict) and read.keys() <= {"level", "candidate_compile_sizes"}


def _literal(text: str) -> object:
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError):
            return read(text)
    return None
