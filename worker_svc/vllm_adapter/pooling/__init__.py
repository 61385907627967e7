"""Pooling models of vLLM's zoo: how they pool, and the layers that follow.

`head` reads both from the poolers that vLLM built.
Imported by `vllm_adapter.model`; imports `shapes`.
"""
