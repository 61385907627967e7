"""Log-probabilities as OpenAI's and vLLM's answers show them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from protos.triptych.v1 import common_pb2 as pb

# What stands for minus infinity, which JSON does not have; OpenAI's and vLLM's number.
LEAST: Final = -9999.0


class TokenReport(NamedTuple):
    """What is known of one token of an answer, or of a prompt that is echoed.

    Attributes:
        offset: where its text begins in the answer's text; for one that goes on with a character, where that begins.
        logprob: natural logarithm; ``None`` for a prompt's first token, which nothing precedes.
        top: the likeliest tokens with theirs, best first.
    """

    token_id: int
    offset: int
    logprob: float | None
    top: Sequence[tuple[int, float]] = ()

    @classmethod
    def of(cls, token_id: int, offset: int, entry: pb.TokenLogprobs, count: int) -> "TokenReport":
        """A token with its entry from the wire, of which the ``count`` likeliest tokens are told."""
        top = zip(entry.top_token_ids[:count], map(_finite, entry.top_logprobs[:count]), strict=True)
        return cls(token_id, offset, _finite(entry.logprob), tuple(top))


@dataclass(frozen=True, slots=True)
class Reporter:
    """Writes one answer's log-probabilities.

    Attributes:
        token_bytes: the bytes that a token stands for.
        as_ids: write tokens as ``token_id:5`` instead of their text.
        wanted: whether the answer is to have log-probabilities of its tokens at all.
    """

    token_bytes: Callable[[int], bytes]
    as_ids: bool = False
    wanted: bool = True

    def text(self, token_id: int) -> str:
        """A token as it is written; bytes that are only part of a character become U+FFFD."""
        return f"token_id:{token_id}" if self.as_ids else self.token_bytes(token_id).decode(errors="replace")

    def chat(self, tokens: Iterable[TokenReport]) -> dict[str, Any] | None:
        """A chat choice's ``logprobs``."""
        if not self.wanted:
            return None
        return {
            "content": [
                {
                    **self._chat_token(token.token_id, token.logprob),
                    "top_logprobs": [self._chat_token(*one) for one in token.top],
                }
                for token in tokens
            ]
        }

    def _chat_token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self.text(token_id),
            "logprob": logprob,
            "bytes": list(self.token_bytes(token_id)),
        }

    def completion(self, tokens: Sequence[TokenReport]) -> dict[str, Any] | None:
        """A plain completion's ``logprobs``. The chosen token is among the likeliest, too: there may be one more than were asked for."""
        if not self.wanted:
            return None
        return {
            "tokens": [self.text(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._likeliest(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _likeliest(self, token: TokenReport) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        found = {self.text(token.token_id): token.logprob}
        for token_id, logprob in token.top:
            # Parts of characters look alike; the chosen one's number stands, then the likelier one's.
            found.setdefault(self.text(token_id), logprob)
        return found

    def prompt(
        self, prompt: Sequence[int], entries: Sequence[pb.TokenLogprobs], count: int
    ) -> list[dict[str, dict[str, Any]] | None]:
        """``prompt_logprobs`` in vLLM's shape: for each prompt token but the first, its own and the ``count`` likeliest ones by id."""
        told: list[dict[str, dict[str, Any]] | None] = [None]
        for token_id, entry in zip(prompt[1:], entries, strict=True):
            found = {str(token_id): self._ranked(token_id, entry.logprob, entry.rank)}
            likeliest = zip(entry.top_token_ids[:count], entry.top_logprobs[:count], strict=True)
            for rank, (other, logprob) in enumerate(likeliest, start=1):
                found.setdefault(str(other), self._ranked(other, logprob, rank))
            told.append(found)
        return told

    def _ranked(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": self.text(token_id)}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
