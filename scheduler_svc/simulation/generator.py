"""Makes requests: independent requests, conversations and agents."""

import random
from dataclasses import dataclass

from scheduler_svc.simulation.requests import GENERATED, SimulatedRequest

Range = tuple[int, int]
"""Least and most; values between are equally likely."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is asked of a deployment."""

    requests: int
    rate: float
    """Requests a second, over all sessions."""
    prompt_tokens: Range
    """New tokens of each prompt: a question, or the result of a tool."""
    output_tokens: Range
    shared_tokens: int
    """Tokens with which all prompts begin: a system prompt, the descriptions of tools."""
    turns: Range
    """Requests of a session. Each repeats the prompt and the answer before it."""
    pause_s: float
    """Mean seconds from an answer to the next turn."""
    seed: int = 0


KINDS = {
    "random": Traffic(1000, 1.0, (100, 1000), (50, 350), 0, (1, 1), 0.0),
    "conversations": Traffic(1000, 1.0, (20, 300), (50, 400), 500, (2, 10), 20.0),
    "agents": Traffic(1000, 1.0, (100, 2000), (20, 200), 4000, (4, 20), 2.0),
}
"""Typical traffic by name: independent requests, people who chat, programs that call tools."""


def generate(traffic: Traffic) -> list[SimulatedRequest]:
    """Returns the requests in the order in which their sessions begin."""
    dice = random.Random(traffic.seed)  # noqa: S311 - traffic is no secret
    made: list[SimulatedRequest] = []
    now, number = 0.0, 0
    while len(made) < traffic.requests:
        number += 1
        turns = min(dice.randint(*traffic.turns), traffic.requests - len(made))
        made += _session(traffic, f"s{number}", turns, now, dice)
        now += dice.expovariate(traffic.rate / turns)
    return made


def _session(
    traffic: Traffic, name: str, turns: int, start_s: float, dice: random.Random
) -> list[SimulatedRequest]:
    known = [("shared", traffic.shared_tokens)] if traffic.shared_tokens else []
    requests = []
    for turn in range(turns):
        prompt, output = dice.randint(*traffic.prompt_tokens), dice.randint(*traffic.output_tokens)
        pause_s = dice.expovariate(1 / traffic.pause_s) if turn and traffic.pause_s else 0.0
        known = [*known, (f"{name}.{turn}", prompt)]
        total = sum(count for _, count in known)
        session = name if turns > 1 else ""
        requests.append(
            SimulatedRequest(start_s if not turn else pause_s, total, output, tuple(known), session=session)
        )
        known = [*known, (GENERATED, output)]
    return requests
