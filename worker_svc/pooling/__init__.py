"""Pooling models: prompts in, a result each out, in graphs, without a KV cache or sampling.

`engine` configures a pooling model, `pool_runner` runs its plans and pools hidden states.
Imported by `execution.worker` and `vllm_adapter.model`; imports `graphs`, `devices` and `shapes`.
"""
