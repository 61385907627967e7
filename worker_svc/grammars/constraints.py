"""Chooses tokens for slots with a grammar.

A token is drawn first and then looked up in the grammar, which takes microseconds. Only if the grammar
rejects it is the mask built and applied, and the row drawn again with different random numbers. The
distribution is the same as with the mask applied first:

- Greedy: if the most probable token is allowed, it is the most probable of the allowed tokens.
- Sampled: an allowed token is drawn with its own probability, or, after a rejected draw, with its share of
  the allowed tokens. Together that is its share of the allowed tokens.

Filters that compare tokens (`top_p`, `top_k`, `min_p`) need the mask first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from protos.errors import Internal, InvalidArgument, TriptychError, Unavailable
from worker_svc.grammars.compiler import GrammarCompiler
from worker_svc.grammars.lowering.refusals import PARAM
from worker_svc.grammars.masks import Masks
from worker_svc.grammars.matcher import Matcher
from worker_svc.grammars.spec import Spec

Draw = Callable[[Sequence[int] | None], torch.Tensor]
"""Draws a token for each given row: int64 [rows], -1 where no token is allowed.

It reads the current logits of the step. `None` draws all rows; by then only rows with filters that need the
mask are masked.
"""


@dataclass(frozen=True)
class Choice:
    """The tokens chosen in one step."""

    tokens: torch.Tensor
    """int64 [bucket]; -1 where no token is allowed. The row of a slot with an error is meaningless."""
    forced: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Tokens that the grammar forces after the chosen one, by slot."""
    errors: Mapping[int, TriptychError] = field(default_factory=dict)
    """Why a slot got no token, by slot."""


class Constraints:
    """The matchers of a runner's slots. Not thread-safe."""

    def __init__(
        self, compiler: GrammarCompiler, *, num_slots: int, max_rows: int, vocab_size: int, end_ids: Sequence[int],
        device: torch.device, min_jump: int,
    ) -> None:  # fmt: skip
        """Starts with all slots unconstrained.

        Args:
            compiler: holds the grammars of admitted requests.
            num_slots: slots of the batch.
            max_rows: largest number of rows in a step.
            vocab_size: width of the logits.
            end_ids: tokens that end a sequence.
            device: device of the logits.
            min_jump: shortest chain of forced tokens to emit at once; 0 emits only chains that end the
                sequence.
        """
        self._compiler = compiler
        self._end_ids = tuple(end_ids)
        self._min_jump = min_jump
        self._matchers: list[Matcher | None] = [None] * num_slots
        self._count = 0
        self._masks = Masks(max_rows, vocab_size, device)
        self.num_redrawn = 0
        """Tokens drawn a second time, under a mask."""
        self.num_forced = 0
        """Tokens emitted without a forward pass."""

    def admit(self, slot: int, spec: Spec, output: Sequence[int]) -> None:
        """Constrains a slot, starting after the tokens that the request has already generated.

        Raises:
            Unavailable: the compiler has no such grammar, or evicted it; it must be compiled again.
            InvalidArgument: the grammar does not allow `output`.
        """
        grammar = self._compiler.find(spec)
        if grammar is None:
            raise Unavailable("the grammar is not compiled, or was evicted", param=PARAM)
        self._matchers[slot] = Matcher(grammar, self._end_ids, output, partial(self._compiler.refuse, spec))
        self._count += 1

    def release(self, slot: int) -> None:
        """Frees a slot, which may be free or unconstrained."""
        if self._count and self._matchers[slot] is not None:
            self._matchers[slot] = None
            self._count -= 1

    def any_constrained(self, slots: Sequence[int]) -> bool:
        """Whether at least one of the slots is constrained."""
        return self._count > 0 and any(self._matchers[slot] is not None for slot in slots)

    def choose(
        self, slots: Sequence[int], logits: torch.Tensor, draw: Draw, *, masked_first: Sequence[bool],
        room: Sequence[int],
    ) -> Choice:  # fmt: skip
        """Chooses a token for each row of a step and advances the constrained slots' matchers.

        Args:
            slots: slots of the rows without padding.
            logits: float32 [bucket, vocab]; rows that get a mask are modified.
            draw: draws from `logits`.
            masked_first: whether a row's filters need the mask first.
            room: tokens that fit into each slot's sequence after the chosen one.
        """
        matchers = [self._matchers[slot] for slot in slots]
        errors: dict[int, TriptychError] = {}
        first = [row for row, matcher in enumerate(matchers) if matcher is not None and masked_first[row]]
        self._mask(first, matchers, slots, logits, errors)
        tokens = draw(None)
        chosen = tokens.tolist()
        rejected = []
        for row, matcher in enumerate(matchers):
            if matcher is None or slots[row] in errors:
                continue
            if masked_first[row]:
                self._accept_masked(matcher, chosen[row], slots[row], tokens, row, errors)
            elif not self._accept(matcher, chosen[row], slots[row], errors):
                rejected.append(row)
        rejected = [row for row in rejected if slots[row] not in errors]
        if rejected:
            self.num_redrawn += len(rejected)
            self._mask(rejected, matchers, slots, logits, errors)
            drawn = draw(rejected)
            tokens[torch.tensor(rejected, device=tokens.device)] = drawn
            for row, token in zip(rejected, drawn.tolist(), strict=True):
                matcher = matchers[row]
                if matcher is not None and slots[row] not in errors:
                    self._accept_masked(matcher, token, slots[row], tokens, row, errors)
        forced = {
            slots[row]: chain
            for row, matcher in enumerate(matchers)
            if matcher is not None
            and slots[row] not in errors
            and (chain := self._jump(matcher, slots[row], room[row], errors))
        }
        self.num_forced += sum(map(len, forced.values()))
        return Choice(tokens, forced, errors)

    def _mask(
        self, rows: Sequence[int], matchers: Sequence[Matcher | None], slots: Sequence[int], logits: torch.Tensor,
        errors: dict[int, TriptychError],
    ) -> None:  # fmt: skip
        """Masks the logits of some rows."""
        for row in rows:
            matcher = matchers[row]
            assert matcher is not None
            try:
                matcher.fill_mask(self._masks.rows, row)
            except TriptychError as error:
                errors[slots[row]] = error
        self._masks.apply(logits, rows)

    def _accept(self, matcher: Matcher, token: int, slot: int, errors: dict[int, TriptychError]) -> bool:
        """Offers a token to the grammar. Returns False if it is rejected and the row must be drawn again.

        A failure of the matcher is recorded in `errors` and returns True: drawing again would not help.
        """
        try:
            return token >= 0 and matcher.accept(token)
        except TriptychError as error:
            errors[slot] = error
            return True

    def _accept_masked(
        self, matcher: Matcher, token: int, slot: int, tokens: torch.Tensor, row: int, errors: dict[int, TriptychError]
    ) -> None:  # fmt: skip
        """Offers a token drawn under the mask to the grammar.

        If it is rejected, replaces it in `tokens` by a forced end token or records an error.
        """
        if self._accept(matcher, token, slot, errors):
            return
        try:
            end = (
                None if matcher.ended else matcher.accept_forced_end(self._masks.rows, self._masks.spare_row)
            )
        except TriptychError as error:
            errors[slot] = error
            return
        if end is not None:
            # Only an end token may follow, but min_tokens or a bias forbids it. The grammar wins.
            tokens[row] = end
        elif matcher.ended:
            errors[slot] = Internal("the plan continues a request after the end of its grammar")
        else:
            # Other parameters forbid every token that the grammar allows, or the grammar is at a dead end.
            errors[slot] = InvalidArgument(
                "no token is left that both the grammar and the request's other parameters"
                " (allowed_token_ids, bad_words,"
                " logit_bias) allow",
                param=PARAM,
            )

    def _jump(
        self, matcher: Matcher, slot: int, room: int, errors: dict[int, TriptychError]
    ) -> tuple[int, ...]:
        """Returns the tokens that follow without a choice, if there are enough of them."""
        if matcher.ended or room <= 0:
            return ()
        try:
            return matcher.jump(self._masks.rows, self._masks.spare_row, room, self._min_jump)
        except TriptychError as error:
            errors[slot] = error
            return ()
