"""Quantized weights: integers of 4 or 8 bits with scales, in the formats that checkpoints store them in.

`scheme` says how a layer is quantized; `checkpoint_config` reads that from a model's configuration and
refuses what is not served; `stored_tensors` turns the tensors of each format into one form while they are
read; `codes` packs integers; `rounding` makes them from floating-point weights, and so does `gptq`, with what
`calibration` learns from the `calibration_text`; `mxfp4` undoes the one format that does not stay quantized.
Imported by `model_files` and `vllm_adapter`; imports `protos` only.
"""
