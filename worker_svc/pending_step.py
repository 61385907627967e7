"""A step that was handed to the device, which may still be running it."""

import contextlib
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

    outputs: Sequence[SlotOutput] = ()
    """The outputs, if the host had to know them to complete the step."""
    read_tokens: Callable[[], Sequence[int]] | None = None
    """Otherwise a function that waits for the step and returns its tokens: one for each slot of its work, or
    a mark in its place. A chunk that samples none has any token, or a mark."""
    read_result: Callable[[], StepResult] | None = None
    """Otherwise a function that waits for the step's result, which another rank computes."""
    runs_ahead: bool = False
    """Whether the next step may be launched before the step is read, and on which thread that happens does
    not matter: nothing of the next step depends on the host."""
    has_work: bool = True
    """Whether a graph ran; False for a plan without work, or with work of refused requests only."""

    def read(self, work: Work | None) -> tuple[Sequence[int], Sequence[SlotOutput]]:
        """Waits for a step of this work.

        Returns one token for each slot of the work, if that is all that the step gives, else no tokens and
        its outputs by slot.
        """
        if self.read_result is not None:
            result = self.read_result()
            return result.token_ids, result.outputs
        if self.read_tokens is not None:
            tokens = self.read_tokens()
            if tokens and min(tokens) < 0:
                pairs = zip(slots_of(work), tokens, strict=True)
                return (), [output_of(slot, token) for slot, token in pairs]
            return () if isinstance(work, Prefill) and not work.sample else tokens, ()
        tokens = one_token_each(work, self.outputs)
        return tokens, () if tokens else self.outputs

    def discard(self, work: Work | None) -> None:
        """Waits for a step that nothing is going to read."""
        with contextlib.suppress(BaseException):
            self.read(work)

    def wait(self, work: Work | None) -> list[SlotOutput]:
        """Waits for a step of this work; returns its outputs by slot."""
        tokens, outputs = self.read(work)
        slots = slots_of(work) if tokens else ()
        return [*outputs, *(SlotOutput(slot, (token,)) for slot, token in zip(slots, tokens, strict=True))]
