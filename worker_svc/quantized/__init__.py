"""Quantized weights: integers of 4 or 8 bits with scales, in the formats of checkpoints.

`checkpoint_config` reads the schemes of a model's layers and refuses all others. `stored_tensors` turns the
tensors of each format into one form while they are read. `codes` defines schemes and rounds weights to
integers; `calibration` does so by effects on the output. Imported by `model_files` and `vllm_adapter`;
imports `protos`.
"""
