"""Prompts and samplings that every layout of ranks must answer like one rank."""

from tests.support.ranks.replica import Replica

SHARED = [5 + place * 7 % 200 for place in range(140)]
"""A prefix of two chunks and a part of a third."""
PROMPTS = ([3, 9, 27, 81], SHARED + [11] * 20, SHARED + [12] * 9, [40 + place % 90 for place in range(70)])
"""Shorter and longer than a chunk, and two that share a prefix."""
COUNT = 24
"""Tokens of each of `answers`."""
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.9, "top_p": 0.9, "seed": 7}


def answers(running: Replica) -> list[list[int]]:
    """Returns greedy and seeded answers, of one sequence and of three."""
    greedy = running.generate_all(PROMPTS, COUNT, GREEDY)
    seeded = running.generate_all(PROMPTS, COUNT, SEEDED)
    return [*greedy, *seeded, *running.generate(PROMPTS[1], COUNT, SEEDED, n=3)]
