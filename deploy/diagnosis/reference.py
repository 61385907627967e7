"""transformers on this host's CPU, as the reference for what a device generates.

The reference computes all log-probabilities of an answer in one forward pass in float32. If the likeliest
token after the prompt and after each part of the answer is the answer's next token, then greedy generation
yields the answer, by induction.

How much rounding changes depends on the model and the prompt. So the reference also runs in the device's
type. The device may be off by a few times the most that this has changed so far.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from deploy.diagnosis.findings import Missing
from deploy.diagnosis.local_replica import Answer

# How far log-probabilities may be from those in float32: this many nats, and this many times the difference
# that the device's type alone makes.
_NATS = 0.02
_TIMES_ROUNDING = 4.0
# The likeliest tokens, whose log-probabilities show what rounding changes.
_LIKELIEST = 5


class Reference:
    """One model, in float32 and in the device's type."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, trust_remote_code: bool, advice: str) -> None:
        """Loads the model.

        Args:
            folder: the model's files.
            dtype: of the device's activations.
            trust_remote_code: whether the model's own Python code may run.
            advice: what to do if the device is wrong.
        """

        def load(kind: torch.dtype) -> Any:
            return AutoModelForCausalLM.from_pretrained(
                folder, dtype=kind, trust_remote_code=trust_remote_code
            ).eval()

        self._model = load(torch.float32)
        self._in_dtype = None if dtype == torch.float32 else load(dtype)
        self._advice = advice
        self._rounded = 0.0
        """The most nats by which the two have differed."""

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self._model).__name__

    def compare(self, answers: Sequence[Answer]) -> str:
        """Returns in words how far greedy answers are from the reference.

        Raises:
            Missing: if they are too far.
        """
        worst, where, ties = 0.0, "", 0
        expected = [self._expected(answer) for answer in answers]
        tolerance = _NATS + _TIMES_ROUNDING * self._rounded
        for answer, rows in zip(answers, expected, strict=True):
            for step, (row, token, entry) in enumerate(
                zip(rows, answer.tokens, answer.logprobs, strict=True)
            ):
                gap = float(row.max() - row[token])
                ties += gap > 0
                tokens = [*entry.top_token_ids, token]
                off = float((row[tokens] - torch.tensor([*entry.top_logprobs, entry.logprob])).abs().max())
                place = f"step {step} after a prompt of {len(answer.prompt)} tokens"
                if not gap <= tolerance:  # also catches NaN
                    raise Missing(
                        f"{place} chose token {token}, not the reference's {int(row.argmax())}, which is"
                        f" {gap:.2g} nats likelier; {self._advice}"
                    )
                if not off <= tolerance:
                    raise Missing(
                        f"{place} has log-probabilities {off:.2g} off the reference's; {self._advice}"
                    )
                if off >= worst:
                    worst, where = off, place
        tied = f" ({ties} of them near ties)" if ties else ""
        rounding = f"; rounding alone gives {self._rounded:.2g}" if self._rounded else ""
        return f"greedy tokens agree{tied}, log-probabilities within {worst:.2g} ({where}{rounding})"

    def _expected(self, answer: Answer) -> torch.Tensor:
        """Returns the reference's log-probabilities, and notes how much rounding changes them."""
        expected = _logprobs(self._model, answer)
        if self._in_dtype is not None:
            changed = (_logprobs(self._in_dtype, answer) - expected).abs()
            likeliest = changed.gather(1, expected.topk(_LIKELIEST).indices)
            self._rounded = max(self._rounded, float(likeliest.max()))
        return expected


def _logprobs(model: Any, answer: Answer) -> torch.Tensor:
    """Returns a model's log-probabilities for each token of an answer, [tokens, vocab]."""
    tokens = torch.tensor([[*answer.prompt, *answer.tokens[:-1]]])
    with torch.inference_mode():
        result: torch.Tensor = model(tokens, logits_to_keep=len(answer.tokens)).logits[0].float()
        return result.log_softmax(dim=-1)
