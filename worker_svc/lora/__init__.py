"""LoRA adapters on the host: read from PEFT's checkpoints, checked, and kept until plans place them.

`vllm_adapter` fits an adapter to the model's layers, and `devices` computes with it. `execution` keeps the
store. This room imports `devices` and `protos`.
"""
