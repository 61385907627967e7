"""Settings of the worker whose values have vLLM's forms.

`compilation_config` reads `--compilation-config`, `cpu_kv_space` the variable VLLM_CPU_KVCACHE_SPACE, and
`generation_defaults` `--generation-config` and its overrides. The worker's settings and rooms above them
import this room, which imports `protos` alone.
"""
