"""transformers as the reference of what a model says."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch


class Reference:
    """One model run by transformers, in one dtype.

    Comparing with ``generate`` token by token costs a forward pass per token. This takes one per sequence: if, given the prompt and
    each prefix of a continuation, the likeliest next token is the continuation's next, then greedy generation yields the continuation,
    by induction.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        # Models that were made up have none.
        self.tokenizer: Any = (
            AutoTokenizer.from_pretrained(folder) if (folder / "tokenizer_config.json").exists() else None
        )
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the model expects at the start."""
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def logprobs(self, prompt: Sequence[int], continuation: Sequence[int]) -> torch.Tensor:
        """Log-probabilities, float32 [continuation, vocab], of the token at each place of the continuation given all before it."""
        with torch.inference_mode():
            logits = self._model(
                torch.tensor([[*prompt, *continuation[:-1]]]), logits_to_keep=len(continuation)
            ).logits[0]
            logprobs: torch.Tensor = logits.float().log_softmax(dim=-1)
            return logprobs

    def greedy_mismatch(self, prompt: Sequence[int], continuation: Sequence[int]) -> str:
        """Empty if greedy generation from ``prompt`` yields ``continuation``, else where it differs, and by how much."""
        logprobs = self.logprobs(prompt, continuation)
        best = logprobs.argmax(dim=-1)
        wrong = (best != torch.tensor(continuation)).nonzero()
        if not len(wrong):
            return ""
        at = int(wrong[0])
        gap = float(logprobs[at, best[at]] - logprobs[at, continuation[at]])
        return f"token {at} after {len(prompt)} is {continuation[at]}, the reference says {int(best[at])} (by {gap:.2g} nats)"

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Transformers' own greedy generation, past end tokens."""
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor([prompt]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
            )
        ids: list[int] = output[0, len(prompt) :].tolist()
        return ids


@cache
def open_reference(folder: Path, dtype: torch.dtype) -> Reference:
    """The reference, loaded once per process."""
    return Reference(folder, dtype)
