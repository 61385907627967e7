"""The budget of a request's thinking, as the worker needs it: in tokens of the model's markers."""

import functools
import itertools
from collections.abc import Sequence
from typing import Final

from gateway.generation.answer_plan import call_format, plan_thinking, triggers_of
from gateway.parsers.reasoning import Thinking
from gateway.scheduler_client.served_model import ServedModel
from gateway.schemas.sampling import SamplingRequest
from gateway.settings import Settings
from gateway.text.chat_template import end_of_thoughts
from gateway.text.tokenization import TextCodec
from protos.errors import Unsupported
from protos.limits import MAX_MARKER_TOKENS, MAX_MARKERS
from protos.triptych.v1 import common_pb2 as pb

_UNLIMITED: Final = -1
# Around a marker. All markers come without text around them first.
_BEFORE: Final = ("", "\n")
_AFTER: Final = ("", "\n", "\n\n", " ")


def thinking_budget(
    settings: Settings, served: ServedModel, body: SamplingRequest, prompt: Sequence[int]
) -> pb.ThinkingBudget | None:
    """Returns the budget of the answer to ``prompt``; ``None`` if it has none, or thinks no more.

    Raises:
        Unsupported: if ``body`` sets a budget for a model whose thinking has no known end. Efforts, and the
            budgets of Anthropic's clients, are for any model.
    """
    tokens = asked = body.thinking_token_budget
    if asked is None and body.effort is not None:
        tokens = settings.reasoning_effort_budgets.get(body.effort)
    if tokens is None or tokens == _UNLIMITED:
        return None
    plan, text = plan_thinking(settings, served, body, prompt), served.text
    if plan.at in (Thinking.OVER, Thinking.ANSWER):
        return None
    if (form := plan.form) is None:
        if asked is None or body.budget_is_a_hint:
            return None
        raise Unsupported(
            f"thinking_token_budget is not supported: the gateway does not know how '{served.model.served_name}'"
            " ends its thoughts; omit it, or start the gateway with --reasoning-parser",
            param="thinking_token_budget",
        )
    triggers = triggers_of(call_format(settings, served)) if body.may_call else ()
    close = _tokens(text, end_of_thoughts(text.chat_template, form.end))
    return pb.ThinkingBudget(
        tokens=tokens,
        open=plan.at is Thinking.OPEN,
        starts=_sequences(text, (form.start, *form.starts)),
        ends=_sequences(text, (form.end, *form.ends, *triggers)),
        close_ids=close if len(close) <= MAX_MARKER_TOKENS else _tokens(text, form.end),
    )


@functools.lru_cache(64)
def _sequences(text: TextCodec, markers: Sequence[str]) -> list[pb.TokenSequence]:
    """Returns the token sequences in which a model may write ``markers``.

    Where markers are no special tokens, a token may also contain the line break after one.
    """
    found: list[list[int]] = []
    for before, after, marker in itertools.product(_BEFORE, _AFTER, markers):
        ids = _tokens(text, marker, before, after)
        if len(ids) <= MAX_MARKER_TOKENS and ids not in found:
            found.append(ids)
    return [pb.TokenSequence(token_ids=ids) for ids in found[:MAX_MARKERS]]


def _tokens(text: TextCodec, marker: str, before: str = "", after: str = "") -> list[int]:
    """Returns the tokens of ``marker`` between other texts, without those that are not part of it."""
    ids = text.encode(before + marker + after, add_special_tokens=False)
    while marker in text.decode(ids[1:]):
        ids = ids[1:]
    while marker in text.decode(ids[:-1]):
        ids = ids[:-1]
    return ids
