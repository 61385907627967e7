"""A prompt of an answer: its tokens, and what becomes known of it while its sequences run."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.answers.logprobs import TokenReport
from gateway.scheduler_link.pending_request import PendingRequest
from gateway.text.detokenizer import Detokenizer
from protos.triptych.v1 import common_pb2 as pb


@dataclass(slots=True)
class Prompt:
    """One prompt, shared by all sequences that continue it."""

    token_ids: Sequence[int]
    logprobs: Sequence[pb.TokenLogprobs] = ()
    """One entry for each token but the first, if they were asked for. Grows while the prompt is computed, and
    is complete before the group delivers the first event of an answer."""
    echo: str | None = None
    """The text that each answer begins with; ``None`` if answers do not repeat the prompt."""
    reports: tuple[TokenReport, ...] | None = None
    """The prompt's tokens as part of an answer that repeats it, if they are reported and known."""
    num_cached_tokens: int | None = None
    """Prompt tokens that came from the prefix cache, once that is known. A request that is sent again finds
    other prefixes there, which do not count."""
    replica_id: str = ""
    """The replica that ran it first, once that is known."""
    max_tokens: int | None = None
    """Tokens that each sequence may have, if the request says so."""
    num_ended: int = 0
    """Its sequences that have ended by themselves."""
    longest: int = 0
    """Tokens of the longest of them."""

    @classmethod
    def of(cls, pending: PendingRequest, echo: str | None) -> "Prompt":
        """Returns the prompt of a request under way."""
        sampling = pending.request.sampling
        return cls(
            pending.request.prompt_token_ids,
            pending.prompt_logprobs,
            echo,
            max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        )

    def report(self, detokenizer: Detokenizer, count: int) -> None:
        """Fills ``reports``, each with the ``count`` likeliest tokens.

        Takes time in proportion to the prompt and ``count``.
        """
        found, offset = [], 0
        for token_id, entry in zip(self.token_ids, (None, *self.logprobs), strict=True):
            if entry is None:
                found.append(TokenReport(token_id, offset, None))
            else:
                found.append(TokenReport.of(token_id, offset, entry, count))
            offset += len(detokenizer.push((token_id,)))
        self.reports = tuple(found)
