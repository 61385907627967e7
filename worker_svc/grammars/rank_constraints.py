"""Grammars in a replica of several ranks: one rank matches, the others of its stage take its choice.

Matching depends on the host's time limits and on which grammars a cache still has, so ranks might choose
differently. A step without a constrained row needs no message.
"""

from collections.abc import Sequence

import torch

from protos.errors import TriptychError
from protos.step_messages import result_from_proto, result_to_proto
from protos.steps import SlotOutput, StepPlan, StepResult
from protos.triptych.v1 import worker_pb2
from worker_svc.devices.host import upload
from worker_svc.grammars.constraints import Choice, Draw, StepConstraints
from worker_svc.grammars.spec import Spec
from worker_svc.ranks.channels import Channel


class LeadingConstraints:
    """The chooser's grammars. Tells the other ranks of its stage what it chose.

    A request that cannot be constrained keeps its slot, because all ranks must run the same rows. It gets its
    error in place of its first token.
    """

    def __init__(self, own: StepConstraints, channel: Channel, *, has_peers: bool) -> None:
        """Matches with `own`; `has_peers` says whether the stage has other ranks, which read `channel`."""
        self._own = own
        self._channel = channel if has_peers else None
        self._refused: dict[int, TriptychError] = {}

    def admit(self, slot: int, spec: Spec, output: Sequence[int]) -> None:
        """Constrains a slot, or notes why that is impossible."""
        try:
            self._own.admit(slot, spec, output)
        except TriptychError as error:
            self._refused[slot] = error

    def release(self, slot: int) -> None:
        """Frees a slot, which may be free or unconstrained."""
        self._refused.pop(slot, None)
        self._own.release(slot)

    def any_constrained(self, slots: Sequence[int]) -> bool:
        """Whether any of the slots is constrained, or should have been."""
        return self._own.any_constrained(slots) or not self._refused.keys().isdisjoint(slots)

    def choose(
        self, slots: Sequence[int], logits: torch.Tensor, draw: Draw, *, masked_first: Sequence[bool],
        room: Sequence[int],
    ) -> Choice:  # fmt: skip
        """Chooses a token for each row of a step; see `Constraints.choose`."""
        choice = self._own.choose(slots, logits, draw, masked_first=masked_first, room=room)
        if self._refused:
            refused = {slot: self._refused[slot] for slot in slots if slot in self._refused}
            choice = Choice(choice.tokens, choice.values, choice.forced, {**choice.errors, **refused})
        if self._channel is not None:
            outputs = tuple(
                SlotOutput(slot, (max(value, 0), *choice.forced.get(slot, ())), error=choice.errors.get(slot))
                for slot, value in zip(slots, choice.values, strict=False)
            )
            message = result_to_proto(StepPlan(0), StepResult(0, outputs=outputs))
            self._channel.send(message.SerializeToString())
        return choice


class FollowingConstraints:
    """The other ranks' view: which slots are constrained, and what the chooser chose for them."""

    def __init__(self, channel: Channel) -> None:
        """Reads the choices of steps from `channel`."""
        self._channel = channel
        self._slots: set[int] = set()

    def admit(self, slot: int, spec: Spec, output: Sequence[int]) -> None:
        """Notes that a slot is constrained."""
        del spec, output
        self._slots.add(slot)

    def release(self, slot: int) -> None:
        """Frees a slot, which may be free or unconstrained."""
        self._slots.discard(slot)

    def any_constrained(self, slots: Sequence[int]) -> bool:
        """Whether any of the slots is constrained."""
        return not self._slots.isdisjoint(slots)

    def choose(
        self, slots: Sequence[int], logits: torch.Tensor, draw: Draw, *, masked_first: Sequence[bool],
        room: Sequence[int],
    ) -> Choice:  # fmt: skip
        """Receives the token of each row of a step."""
        del draw, masked_first, room
        result = result_from_proto(worker_pb2.StepResult.FromString(self._channel.receive()))
        outputs = dict(zip(slots, result.outputs, strict=True))
        values = [output.token_ids[0] for output in result.outputs]
        values += [0] * (logits.shape[0] - len(values))
        return Choice(
            upload(values, logits.device),
            values,
            {
                slot: tuple(output.token_ids[1:])
                for slot, output in outputs.items()
                if len(output.token_ids) > 1
            },
            {slot: output.error for slot, output in outputs.items() if output.error is not None},
        )
