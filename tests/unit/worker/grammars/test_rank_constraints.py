"""Grammars in a replica of several ranks."""

from collections import deque
from typing import Any, cast

import torch

from protos.errors import Unavailable
from worker_svc.grammars.constraints import Choice, Constraints, FollowingConstraints, LeadingConstraints
from worker_svc.grammars.spec import Spec
from worker_svc.ranks.channels import Channel

SPEC = cast("Spec", None)
LOGITS = torch.zeros(4, 10)


class Wire:
    """A channel within one process."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()

    def send(self, message: bytes) -> None:
        self._messages.append(message)

    def receive(self) -> bytes:
        return self._messages.popleft()


class Own:
    """Matchers that choose 5 and force 6 behind it in slot 1; slot 3 has no grammar in the cache."""

    def admit(self, slot: int, *_: Any) -> None:
        if slot == 3:
            raise Unavailable("the grammar is not compiled")

    def release(self, slot: int) -> None:
        del slot

    def any_constrained(self, slots: Any) -> bool:
        return 1 in slots

    def choose(self, slots: Any, *_: Any, **__: Any) -> Choice:
        values = [5 if slot == 1 else 2 for slot in slots] + [0] * (4 - len(slots))
        return Choice(torch.tensor(values), values, {1: (6,)} if 1 in slots else {})


def pair() -> tuple[LeadingConstraints, FollowingConstraints]:
    channel = cast("Channel", Wire())
    leading = LeadingConstraints(cast("Constraints", Own()), channel, has_peers=True)
    return leading, FollowingConstraints(channel)


def test_ranks_agree_on_what_a_grammar_chose() -> None:
    """The other rank gets tokens, forced tokens and padding as the chooser has them."""
    leading, following = pair()
    for each in (leading, following):
        each.admit(1, SPEC, ())
    chosen = leading.choose((0, 1), LOGITS, cast("Any", None), masked_first=(), room=())
    taken = following.choose((0, 1), LOGITS, cast("Any", None), masked_first=(), room=())
    assert taken.values == chosen.values == [2, 5, 0, 0]
    assert taken.forced == chosen.forced == {1: (6,)}
    assert taken.tokens.tolist() == chosen.tokens.tolist()


def test_a_refused_grammar_keeps_its_row() -> None:
    """All ranks run the row, and its request gets the error in place of a token."""
    leading, following = pair()
    for each in (leading, following):
        each.admit(3, SPEC, ())
        assert each.any_constrained((3,))
    leading.choose((3,), LOGITS, cast("Any", None), masked_first=(), room=())
    taken = following.choose((3,), LOGITS, cast("Any", None), masked_first=(), room=())
    assert isinstance(taken.errors[3], Unavailable)
    leading.release(3)
    following.release(3)
    assert not leading.any_constrained((3,))
    assert not following.any_constrained((3,))
