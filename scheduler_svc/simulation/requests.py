"""The requests of a simulation, and the prompts made from their counts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

GENERATED = "*"
"""Name of a prefix piece that repeats generated tokens: an earlier answer in a later prompt."""

VOCAB_SIZE = 1 << 31
"""More than any real vocabulary, so that made-up tokens differ from those of any trace."""

_TOKEN = 7  # every sampled token, and padding of prompts
FIRST_UNIQUE = 1 << 30
"""Token ids from here on are made up."""


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request of a trace. Prompts with equal leading pieces, or equal leading token ids, share a prefix."""

    arrival_s: float
    """Seconds since the start of the trace. Of a later turn of a session: seconds after the end of the turn
    before it."""
    prompt_tokens: int
    """Length of the prompt, its prefix included."""
    output_tokens: int
    prefix: Sequence[tuple[str, int]] = ()
    """Named pieces with which the prompt begins, each with its tokens; the rest of the prompt is its own."""
    tenant: str = ""
    priority: int = 0
    """Lower runs earlier."""
    prompt_token_ids: tuple[int, ...] = ()
    """The prompt itself, where the trace has it."""
    session: str = ""
    """Requests of a session run in turn, in the order of the trace."""


def split_turns(
    requests: Iterable[SimulatedRequest],
) -> tuple[list[SimulatedRequest], list[SimulatedRequest]]:
    """Returns the requests that arrive at a time of their own, and the later turns of sessions."""
    first, later = [], []
    sessions: set[str] = set()
    for request in requests:
        if request.session and request.session in sessions:
            later.append(request)
        else:
            sessions.add(request.session)
            first.append(request)
    return first, later


def retimed(requests: Iterable[SimulatedRequest], time: Callable[[float], float]) -> list[SimulatedRequest]:
    """Returns the requests in the order of new times of arrival; pauses inside sessions stay."""
    first, later = split_turns(requests)
    moved = [replace(one, arrival_s=time(one.arrival_s)) for one in first]
    return sorted(moved, key=lambda one: one.arrival_s) + later


class PromptMaker:
    """Makes token ids that are equal exactly where prompts share pieces.

    A piece begins with a token of its own; all tokens after it are the same, which costs little. Prefix
    keys are chained, so two prompts differ from their first differing piece on.
    """

    def __init__(self) -> None:
        self._firsts: dict[str, int] = {}
        self._next = FIRST_UNIQUE

    def prompt(self, request: SimulatedRequest) -> tuple[int, ...]:
        """Returns the token ids of a request's prompt."""
        if request.prompt_token_ids:
            return request.prompt_token_ids
        tokens: list[int] = []
        for name, count in request.prefix:
            tokens += [_TOKEN] * count
            if name != GENERATED and count:
                tokens[-count] = self._first(name)
        own = request.prompt_tokens - len(tokens)
        if own > 0:
            self._next += 1
            tokens.append(self._next)
            tokens += [_TOKEN] * (own - 1)
        return tuple(tokens)

    def _first(self, name: str) -> int:
        if name not in self._firsts:
            self._next += 1
            self._firsts[name] = self._next
        return self._firsts[name]
