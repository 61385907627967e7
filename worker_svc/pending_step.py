"""A step that was handed to the device, which may still be running it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from protos.errors import InvalidArgument, NotFinite
from protos.step_messages import one_token_each
from protos.steps import Prefill, SlotOutput, StepResult, Work, slots_of

NO_TOKEN: Final = -1
"""In place of a token: the request's parameters exclude all of them."""
NOT_FINITE: Final = -2
"""In place of a token: the model computed NaN or infinity."""


def output_of(slot: int, token: int) -> SlotOutput:
    """Returns the output of a slot for which a step gave a token, or a mark in its place."""
    if token == NOT_FINITE:
        return SlotOutput(slot, error=NotFinite("the model computed NaN or infinity"))
    if token < 0:
        message = (
            "no token is left to sample: allowed_token_ids, bad_words and logit_bias exclude all of them"
        )
        return SlotOutput(slot, error=InvalidArgument(message))
    return SlotOutput(slot, (token,))


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step: either its outputs, or the way to them."""

    work: Work | None = None
    """What of the plan's work runs, without refused and skipped slots; `None` if no graph ran."""
    refused: Sequence[SlotOutput] = ()
    """The admissions of the plan that were refused."""
    outputs: Sequence[SlotOutput] = ()
    """The outputs of the work, if the host had to know them to complete the step."""
    read_tokens: Callable[[], Sequence[int]] | None = None
    """Otherwise a function that waits for the step and returns its tokens: one for each slot of its work, or
    a mark in its place. A chunk that samples none has any token, or a mark."""
    read_result: Callable[[], StepResult] | None = None
    """Otherwise a function that waits for the step's result, which another rank computes."""
    runs_ahead: bool = False
    """Whether the next plan may be launched before the step is read, and on which thread that happens does
    not matter: nothing that it launches depends on the host."""

    def read(self) -> tuple[Sequence[int], Sequence[SlotOutput]]:
        """Waits for the step.

        Returns one token for each slot of the work, if that is all that the step gives, else no tokens and
        its outputs by slot.
        """
        if self.read_result is not None:
            result = self.read_result()
            return result.token_ids, result.outputs
        if self.read_tokens is not None:
            tokens = self.read_tokens()
            if tokens and min(tokens) < 0:
                pairs = zip(slots_of(self.work), tokens, strict=True)
                return (), [output_of(slot, token) for slot, token in pairs]
            return () if isinstance(self.work, Prefill) and not self.work.sample else tokens, ()
        tokens = one_token_each(self.work, self.outputs)
        return tokens, () if tokens else self.outputs

    def wait(self) -> list[SlotOutput]:
        """Waits for the step; returns the refused admissions, then its outputs by slot."""
        tokens, outputs = self.read()
        return [*self.refused, *(as_outputs(self.work, tokens) or outputs)]


def as_outputs(work: Work | None, tokens: Sequence[int]) -> list[SlotOutput]:
    """Returns a token for each slot of the work as outputs; nothing if there are no tokens."""
    slots = slots_of(work) if tokens else ()
    return [SlotOutput(slot, (token,)) for slot, token in zip(slots, tokens, strict=True)]
