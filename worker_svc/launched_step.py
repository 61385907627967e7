"""A step that was handed to the device, which may still be running it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protos.steps import Decode, Prefill, SlotOutput, Work, slots_of


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A launched step: either its outputs, or the way to its tokens."""

    outputs: Sequence[SlotOutput] = ()
    """The outputs, if the host had to know them to complete the step."""
    read_tokens: Callable[[], Sequence[int]] | None = None
    """Otherwise a function that waits for the step and returns its tokens: one for each slot of its work, or
    none if the work samples none."""
    runs_ahead: bool = False
    """Whether the next step may be launched before `read_tokens` is called, and on which thread that happens
    does not matter: nothing of the next step depends on the host."""

    def wait(self, work: Work | None) -> list[SlotOutput]:
        """Waits for the step; returns its outputs by slot.

        Args:
            work: the work that was launched.
        """
        if self.read_tokens is None:
            return list(self.outputs)
        assert isinstance(work, Prefill | Decode)
        tokens = self.read_tokens()
        slots = slots_of(work) if tokens else ()
        return [SlotOutput(slot, (token,)) for slot, token in zip(slots, tokens, strict=True)]
