"""Writes a checkpoint with llm-compressor's GPTQ, in an environment of llm-compressor's own.

`python tests/support/checkpoints/llm_compressor.py MODEL FOLDER` calibrates on made-up tokens. The folder
`llm-compressor-w4a16` is that of the tiny Llama of `tests.support.tiny_models` in bfloat16, written with
llm-compressor 0.14.0.1.
"""

import sys

import torch
from datasets import Dataset  # type: ignore[import-not-found]
from llmcompressor import oneshot  # type: ignore[import-not-found]
from llmcompressor.modifiers.gptq import GPTQModifier  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
torch.manual_seed(0)
tokens = torch.randint(model.config.vocab_size, (16, 64)).tolist()
weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
oneshot(
    model=model,
    dataset=Dataset.from_dict({"input_ids": tokens}),
    recipe=GPTQModifier(
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"]
    ),
    num_calibration_samples=len(tokens),
    max_seq_length=64,
)
model.save_pretrained(sys.argv[2], save_compressed=True)
