"""LoRA adapters: read from PEFT's checkpoints, checked, and kept on the host and in the device's slots.

`vllm_adapter` fits an adapter to the model's layers, and `devices` computes with it. `execution` keeps the
store. This room imports `devices` and `protos`.
"""
