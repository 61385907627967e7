"""Log-probabilities in the shapes of OpenAI's and vLLM's answers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

from pydantic import Field
from typing_extensions import TypedDict

from protos.triptych.v1 import common_pb2 as pb


class ChatTokenLogprob(TypedDict):
    """The log-probability of a token."""

    token: str
    logprob: Annotated[float | None, Field(description="null for the first token of an echoed prompt.")]
    bytes: list[int]


class ChatToken(ChatTokenLogprob):
    """A token of the answer, with the likeliest tokens in its place."""

    top_logprobs: list[ChatTokenLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat choice."""

    content: list[ChatToken]


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion, an entry per token in each list."""

    tokens: list[str]
    token_logprobs: Annotated[
        list[float | None], Field(description="null for the first token of an echoed prompt.")
    ]
    top_logprobs: list[dict[str, float] | None]
    text_offset: Annotated[
        list[int], Field(description="Where each token's text begins in the choice's text.")
    ]


# Stands for minus infinity, which JSON lacks; OpenAI and vLLM use the same number.
MIN_LOGPROB: Final = -9999.0


class TokenReport(NamedTuple):
    """The log-probabilities of a token of an answer or of an echoed prompt."""

    token_id: int
    offset: int
    """Where its text, or its character, begins in the answer's text."""
    logprob: float | None
    """Natural logarithm; ``None`` for a prompt's first token, which nothing precedes."""
    top: Sequence[tuple[int, float]] = ()
    """The likeliest tokens in its place with their log-probabilities, best first."""

    @classmethod
    def from_proto(cls, token_id: int, offset: int, entry: pb.TokenLogprobs, count: int) -> "TokenReport":
        """Returns the report of a token from its wire entry, with the ``count`` likeliest tokens."""
        top = zip(entry.top_token_ids[:count], map(_finite, entry.top_logprobs[:count]), strict=True)
        return cls(token_id, offset, _finite(entry.logprob), tuple(top))


@dataclass(frozen=True, slots=True)
class Reporter:
    """Writes an answer's log-probabilities."""

    token_bytes: Callable[[int], bytes]
    """Returns the bytes that a token stands for."""
    as_ids: bool = False
    """Write tokens as ``token_id:5`` instead of their text."""
    wanted: bool = True
    """Whether the answer has log-probabilities of its tokens at all."""

    def text(self, token_id: int) -> str:
        """Returns a token's text; bytes that are only a part of a character become U+FFFD."""
        return f"token_id:{token_id}" if self.as_ids else self.token_bytes(token_id).decode(errors="replace")

    def chat(self, tokens: Iterable[TokenReport]) -> ChatLogprobs | None:
        """Returns the ``logprobs`` of a chat choice."""
        if not self.wanted:
            return None
        return {
            "content": [
                {
                    **self._chat_token(token.token_id, token.logprob),
                    "top_logprobs": [self._chat_token(*likely) for likely in token.top],
                }
                for token in tokens
            ]
        }

    def _chat_token(self, token_id: int, logprob: float | None) -> ChatTokenLogprob:
        return {
            "token": self.text(token_id),
            "logprob": logprob,
            "bytes": list(self.token_bytes(token_id)),
        }

    def completion(self, tokens: Sequence[TokenReport]) -> CompletionLogprobs | None:
        """Returns the ``logprobs`` of a plain completion.

        The chosen token is added to the likeliest tokens asked for, unless it is among them.
        """
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
            # Different tokens may have the same text (parts of characters). The chosen token's value wins,
            # then the likelier one's.
            found.setdefault(self.text(token_id), logprob)
        return found

    def prompt(
        self, prompt: Sequence[int], entries: Sequence[pb.TokenLogprobs], count: int
    ) -> list[dict[str, dict[str, Any]] | None]:
        """Returns ``prompt_logprobs`` in vLLM's shape.

        Each prompt token but the first has an entry by token id: its own, and those of the ``count``
        likeliest tokens.
        """
        entries_by_id: list[dict[str, dict[str, Any]] | None] = [None]
        for token_id, entry in zip(prompt[1:], entries, strict=True):
            found = {str(token_id): self._ranked(token_id, entry.logprob, entry.rank)}
            likeliest = zip(entry.top_token_ids[:count], entry.top_logprobs[:count], strict=True)
            for rank, (other, logprob) in enumerate(likeliest, start=1):
                found.setdefault(str(other), self._ranked(other, logprob, rank))
            entries_by_id.append(found)
        return entries_by_id

    def _ranked(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": self.text(token_id)}


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
