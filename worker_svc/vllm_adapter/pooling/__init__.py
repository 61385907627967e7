"""Pooling models of vLLM's zoo: how they pool, and the layers that follow.

`head` reads both from the poolers that vLLM built. `colbert` has the projection that comes later.
Imported by `vllm_adapter.model` and `vllm_adapter.building`; imports `shapes`.
"""
