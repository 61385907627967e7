"""Pooling models: prompts in, one vector each out, without a KV cache, graphs or sampling.

`engine` configures a pooling model, `pool_runner` runs its plans, `pooler` pools hidden states.
Imported by `execution.worker`; imports `devices` and `shapes`.
"""
