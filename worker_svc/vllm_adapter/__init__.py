"""Adapts vLLM: every import of it in the worker is here.

`model` loads models and runs them. vLLM finds `platform` and `attention` as plug-ins; `cpu_layers`,
`cpu_moe` and `static_moe` replace some of its layers. `configuration` and `description` translate between
its view of a model and ours, `startup` imports vLLM, `deferred_imports` what of it can wait, `weights`
reads files. `execution` imports this room; it imports `devices`, `graphs`, `shapes` and `model_files`. This
file imports nothing, because vLLM imports `platform` while vLLM itself is half imported.
"""
