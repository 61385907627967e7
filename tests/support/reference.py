"""transformers, as the reference for a model's outputs."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch


class Reference:
    """One model run by transformers in one dtype.

    Comparing with ``generate`` costs a forward pass per token; this costs one per sequence. If the most
    probable token after the prompt and each prefix of a continuation is the continuation's next token, then
    greedy generation yields the continuation, by induction.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

        # Made-up models have no tokenizer.
        self.tokenizer: Any = (
            AutoTokenizer.from_pretrained(folder) if (folder / "tokenizer_config.json").exists() else None
        )
        multimodal = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
        kind: Any = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
        self._model: Any = kind.from_pretrained(folder, dtype=dtype).eval()

    def encode(self, text: str) -> list[int]:
        """Returns token ids, including the special tokens that the model expects at the start."""
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def logprobs(self, prompt: Sequence[int], continuation: Sequence[int]) -> torch.Tensor:
        """Returns the log-probabilities of each token of the continuation, float32 [continuation, vocab]."""
        with torch.inference_mode():
            logits = self._model(
                torch.tensor([[*prompt, *continuation[:-1]]]), logits_to_keep=len(continuation)
            ).logits[0]
            logprobs: torch.Tensor = logits.float().log_softmax(dim=-1)
            return logprobs

    def greedy_mismatch(self, prompt: Sequence[int], continuation: Sequence[int]) -> str:
        """Returns where greedy generation from `prompt` differs from `continuation`; empty if nowhere."""
        logprobs = self.logprobs(prompt, continuation)
        best = logprobs.argmax(dim=-1)
        wrong = (best != torch.tensor(continuation)).nonzero()
        if not len(wrong):
            return ""
        at = int(wrong[0])
        gap = float(logprobs[at, best[at]] - logprobs[at, continuation[at]])
        return f"token {at} after a prompt of {len(prompt)} is {continuation[at]}, not the reference's {int(best[at])} (by {gap:.2g} nats)"

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Generates greedily with transformers, ignoring end tokens."""
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor([prompt]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
            )
        ids: list[int] = output[0, len(prompt) :].tolist()
        return ids


@cache
def open_reference(folder: Path, dtype: torch.dtype) -> Reference:
    """Returns the reference model, loaded once per process."""
    return Reference(folder, dtype)
