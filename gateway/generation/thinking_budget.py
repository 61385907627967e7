"""The budget of a request's thinking, as the worker needs it: in tokens of the model's markers."""

from collections.abc import Sequence
from typing import Final

from gateway.generation.answer_plan import plan_thinking
from gateway.parsers.reasoning import Thinking
from gateway.scheduler_client.served_model import ServedModel
from gateway.schemas.sampling import SamplingRequest
from gateway.settings import Settings
from gateway.text.chat_template import end_of_thoughts
from protos.errors import Unsupported
from protos.limits import MAX_MARKER_TOKENS
from protos.triptych.v1 import common_pb2 as pb

_UNLIMITED: Final = -1


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
    start, end, close = (
        text.encode(marker, add_special_tokens=False)
        for marker in (form.start, form.end, end_of_thoughts(text.chat_template, form.end))
    )
    return pb.ThinkingBudget(
        tokens=tokens,
        open=plan.at is Thinking.OPEN,
        start_ids=start,
        end_ids=end,
        close_ids=close if len(close) <= MAX_MARKER_TOKENS else end,
    )
