"""Constrained slots: which there are, and how their tokens are chosen.

A token is drawn first and looked up in the grammar then, which costs some microseconds; only where the grammar refuses it is the mask made,
laid on the logits and the row drawn again, with other random numbers. The result is the same as with the mask first. Greedy: the likeliest
token, if it is allowed, is the likeliest of those allowed. Drawn: a token that is allowed comes with its own probability, or with its share of
those allowed after one that was not, which together is its share. Only filters that look at other tokens (top_p, top_k, min_p) see the mask
first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from protos.errors import Internal, InvalidArgument, TriptychError, Unavailable
from worker_svc.grammars.compiler import GrammarCompiler
from worker_svc.grammars.lowering.limits import PARAM
from worker_svc.grammars.masks import Masks
from worker_svc.grammars.matcher import Matcher
from worker_svc.grammars.spec import Spec

Draw = Callable[[Sequence[int] | None], torch.Tensor]
"""Draws tokens, int64 [rows], for some rows of the step's logits as they are then, -1 where none is allowed; ``None`` for all of them, before
any was masked but those whose filters see the mask."""


@dataclass(frozen=True)
class Choice:
    """What came of one step's rows.

    Attributes:
        tokens: int64 [bucket]; -1 where none is allowed.
        forced: what follows without a choice behind the token of a row, by slot.
        errors: why a slot got no token, by slot; whatever stands in its row means nothing.
    """

    tokens: torch.Tensor
    forced: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    errors: Mapping[int, TriptychError] = field(default_factory=dict)


class Constraints:
    """The matchers of a runner's slots. Not thread-safe."""

    def __init__(
        self, compiler: GrammarCompiler, *, num_slots: int, most_rows: int, vocab_size: int, end_ids: Sequence[int],
        device: torch.device, least_jump: int,
    ) -> None:  # fmt: skip
        """No slot is constrained.

        Args:
            compiler: has the grammars of requests that are admitted.
            num_slots: of the batch.
            most_rows: of a step.
            vocab_size: of the logits.
            end_ids: tokens that end a sequence.
            device: the logits'.
            least_jump: forced tokens that are emitted at once if there are at least so many; 0: never, but for the end.
        """
        self._compiler = compiler
        self._end_ids = tuple(end_ids)
        self._least_jump = least_jump
        self._matchers: list[Matcher | None] = [None] * num_slots
        self._count = 0
        self._masks = Masks(most_rows, vocab_size, device)
        self.num_redrawn = 0
        """Tokens that were drawn again, under a mask."""
        self.num_forced = 0
        """Tokens that needed no forward pass."""

    def admit(self, slot: int, spec: Spec, output: Sequence[int]) -> None:
        """A constrained request takes a slot, with what it has generated before.

        Raises:
            Unavailable: if its grammar is not there (any more); it is to be compiled again.
            InvalidArgument: if the grammar does not allow that output.
        """
        grammar = self._compiler.find(spec)
        if grammar is None:
            raise Unavailable("the grammar is not among the compiled ones (any more)", param=PARAM)
        self._matchers[slot] = Matcher(grammar, self._end_ids, output, partial(self._compiler.refuse, spec))
        self._count += 1

    def release(self, slot: int) -> None:
        """Frees a slot; it may be free or unconstrained."""
        if self._count and self._matchers[slot] is not None:
            self._matchers[slot] = None
            self._count -= 1

    def any_of(self, slots: Sequence[int]) -> bool:
        """Whether one of the slots is constrained."""
        return self._count > 0 and any(self._matchers[slot] is not None for slot in slots)

    def choose(
        self, slots: Sequence[int], logits: torch.Tensor, draw: Draw, *, masked_first: Sequence[bool],
        room: Sequence[int],
    ) -> Choice:  # fmt: skip
        """Chooses a token for each row of a step, and moves the grammars of the constrained ones on.

        Args:
            slots: of the real rows.
            logits: float32 [bucket, vocab]; rows that are drawn again are changed.
            draw: draws from ``logits`` as they are when it is called.
            masked_first: whether a row's filters have to see the mask.
            room: tokens that fit into each slot's sequence behind the one that is chosen.
        """
        matchers = [self._matchers[slot] for slot in slots]
        errors: dict[int, TriptychError] = {}
        first = [row for row, matcher in enumerate(matchers) if matcher is not None and masked_first[row]]
        self._mask(first, matchers, slots, logits, errors)
        tokens = draw(None)
        chosen = tokens.tolist()
        again = []
        for row, matcher in enumerate(matchers):
            if matcher is None or slots[row] in errors:
                continue
            if masked_first[row]:
                self._take(matcher, chosen[row], slots[row], tokens, row, errors)
            elif not self._try(matcher, chosen[row], slots[row], errors):
                again.append(row)
        again = [row for row in again if slots[row] not in errors]
        if again:
            self.num_redrawn += len(again)
            self._mask(again, matchers, slots, logits, errors)
            drawn = draw(again)
            tokens[torch.tensor(again, device=tokens.device)] = drawn
            for row, token in zip(again, drawn.tolist(), strict=True):
                matcher = matchers[row]
                if matcher is not None and slots[row] not in errors:
                    self._take(matcher, token, slots[row], tokens, row, errors)
        forced = {
            slots[row]: chain
            for row, matcher in enumerate(matchers)
            if matcher is not None
            and slots[row] not in errors
            and (chain := self._forced(matcher, slots[row], room[row], errors))
        }
        self.num_forced += sum(map(len, forced.values()))
        return Choice(tokens, forced, errors)

    def _mask(
        self, rows: Sequence[int], matchers: Sequence[Matcher | None], slots: Sequence[int], logits: torch.Tensor,
        errors: dict[int, TriptychError],
    ) -> None:  # fmt: skip
        for row in rows:
            matcher = matchers[row]
            assert matcher is not None
            try:
                matcher.fill(self._masks.rows, row)
            except TriptychError as error:
                errors[slots[row]] = error
        self._masks.apply(logits, rows)

    def _try(self, matcher: Matcher, token: int, slot: int, errors: dict[int, TriptychError]) -> bool:
        """Takes a token if there is one and the grammar allows it, or notes why it never will."""
        try:
            return token >= 0 and matcher.take(token)
        except TriptychError as error:
            errors[slot] = error
            return True

    def _take(
        self, matcher: Matcher, token: int, slot: int, tokens: torch.Tensor, row: int, errors: dict[int, TriptychError]
    ) -> None:  # fmt: skip
        """Takes a token that was drawn under the mask."""
        if self._try(matcher, token, slot, errors):
            return
        try:
            end = None if matcher.ended else matcher.finish(self._masks.rows, self._masks.scratch)
        except TriptychError as error:
            errors[slot] = error
            return
        if end is not None:
            tokens[row] = (
                end  # the grammar is through, and min_tokens or a bias forbids to end: the grammar wins
            )
        elif matcher.ended:
            errors[slot] = Internal("the plan goes on with a request whose grammar is through")
        else:
            # All that was allowed is forbidden by something else, or the grammar came to a dead end.
            errors[slot] = InvalidArgument(
                "no token is left that both the grammar and the request's other parameters (allowed_token_ids, bad_words,"
                " logit_bias) allow",
                param=PARAM,
            )

    def _forced(
        self, matcher: Matcher, slot: int, room: int, errors: dict[int, TriptychError]
    ) -> tuple[int, ...]:
        if matcher.ended or room <= 0:
            return ()
        try:
            return matcher.forced(self._masks.rows, self._masks.scratch, room, self._least_jump)
        except TriptychError as error:
            errors[slot] = error
            return ()
