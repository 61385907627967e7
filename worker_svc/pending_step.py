"""A step in the hands of the device, possibly still running."""

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
    """Returns the output of a slot from its token, or from the mark in its place."""
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
    """The running part of the plan's work, without refused and skipped slots; `None` if no graph ran."""
    refused: Sequence[SlotOutput] = ()
    """The refused admissions of the plan."""
    outputs: Sequence[SlotOutput] = ()
    """The outputs of the work, if the host had to know them to complete the step."""
    read_tokens: Callable[[], Sequence[int]] | None = None
    """Otherwise waits for the step and returns a token for each slot of its work, or a mark in its place.
    Of a chunk without sampling, any token, or a mark."""
    read_result: Callable[[], StepResult] | None = None
    """Otherwise waits for the step's result, computed by another rank."""
    runs_ahead: bool = False
    """Whether the next plan may be launched before the step is read, on any thread: none of its launches
    depends on the host."""

    def read(self) -> tuple[Sequence[int], Sequence[SlotOutput]]:
        """Waits for the step.

        Returns a token for each slot of the work if the result is tokens only, else no tokens and the
        outputs by slot.
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
    """Returns the tokens of the work's slots as outputs; nothing without tokens."""
    slots = slots_of(work) if tokens else ()
    return [SlotOutput(slot, (token,)) for slot, token in zip(slots, tokens, strict=True)]
