"""Compares policies for keeping in-place windows, by the share of prompt tokens that need no prefill.

``python -m tests.bench.simulations.kept_windows [--quick]`` replays traces against the real caches and
policies of a hybrid model (full attention and an in-place window), without a device. Full attention has room
for everything, so each miss lacks a kept window.
"""

import random
from collections.abc import Callable, Iterator, Sequence

from protos.steps import GroupKind
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.kv.prefix_index import KeepEnds, KeepJunctions, KeepPolicy, Worth
from scheduler_svc.shapes.shape_config import KvGroup, ShapeConfig
from tests.bench.support.report import parser, report
from tests.support.scheduler.factories import make_sequence

CHUNK, WINDOW, LIMIT = 128, 512, 8192
SHAPES = ShapeConfig(LIMIT, 8, CHUNK, WINDOW, (8,))
GROUPS = (KvGroup(GroupKind.FULL), KvGroup(GroupKind.IN_PLACE_WINDOW, WINDOW))

Prompt = list[int]


class KeepEverything(KeepJunctions):
    """Values every chunk boundary alike: plain least recently used, the baseline."""

    def worth(self, boundary: int, last: int, junction: int) -> Worth:
        """Returns the same high value for any boundary."""
        return "much"


POLICIES: dict[str, Callable[[], KeepPolicy]] = {
    "junctions": KeepJunctions, "ends": KeepEnds, "everything": KeepEverything
}  # fmt: skip


def _tokens(dice: random.Random, count: int) -> Prompt:
    return [dice.randrange(3, 50_000) for _ in range(count)]


def conversations(dice: random.Random, count: int) -> Iterator[Prompt]:
    """Yields the turns of forty concurrent chats under four system prompts; each turn repeats its chat."""
    systems = [_tokens(dice, dice.randrange(200, 1200)) for _ in range(4)]
    chats: list[Prompt] = [list(dice.choice(systems)) for _ in range(40)]
    for _ in range(count):
        index = dice.randrange(len(chats))
        chats[index] += _tokens(dice, dice.randrange(30, 500))
        if len(chats[index]) > LIMIT - 600:
            chats[index] = list(dice.choice(systems)) + _tokens(dice, 100)
        yield list(chats[index])
        chats[index] += _tokens(dice, dice.randrange(30, 300))


def system_prompts(dice: random.Random, count: int) -> Iterator[Prompt]:
    """Yields single questions under thirty long system prompts; some are far more frequent than others."""
    systems = [_tokens(dice, dice.randrange(500, 4000)) for _ in range(30)]
    for _ in range(count):
        yield systems[min(int(dice.paretovariate(1.0)) - 1, 29)] + _tokens(dice, dice.randrange(20, 900))


def documents(dice: random.Random, count: int) -> Iterator[Prompt]:
    """Yields a few questions about each of many documents, one document after the other."""
    document: Prompt = []
    for index in range(count):
        if index % 5 == 0:
            document = _tokens(dice, dice.randrange(1000, 7000))
        yield document + _tokens(dice, dice.randrange(20, 200))


TRACES = (conversations, system_prompts, documents)


def share_of_hits(policy: str, prompts: Sequence[Prompt], kept: int) -> tuple[float, int]:
    """Returns hit tokens divided by prompt tokens, and the number of copied windows.

    The cache has room for ``kept`` windows beside those of eight running requests.
    """
    full = sum(-(-len(prompt) // WINDOW) + 1 for prompt in prompts)
    cache = KvCache(SHAPES, GROUPS, (full + 100, 1 + 8 + kept), model="m", keep=POLICIES[policy]())
    running = []
    for prompt in prompts:
        sequence = make_sequence(prompt)
        if not cache.admit(sequence):
            raise RuntimeError("there is room for eight requests")
        for start in range(sequence.num_computed, len(prompt), CHUNK):
            cache.settle_copies(cache.copies.take())
            end = min(start + CHUNK, len(prompt))
            cache.prefixes.index_chunk(sequence, start, end)
            sequence.num_computed = end
        running.append(sequence)
        if len(running) == 8:
            cache.release(running.pop(0))
    return cache.stats.hit_tokens / cache.stats.queried_tokens, cache.stats.kept_windows


def main() -> None:
    """Prints a table and the line of JSON."""
    options = parser(__doc__, "shorter traces")
    count = 300 if options.parse_args().quick else 2000
    print("share of prompt tokens found (windows copied)")
    print("trace            kept   " + "".join(f"{policy:>20}" for policy in POLICIES))
    figures: dict[str, dict[str, float]] = {}
    for trace in TRACES:
        prompts = list(trace(random.Random(1), count))
        for kept in (8, 32, 128):
            found = {policy: share_of_hits(policy, prompts, kept) for policy in POLICIES}
            cells = "".join(f"{share:>12.3f} ({copies:5d})" for share, copies in found.values())
            print(f"{trace.__name__:<16}{kept:>5}   {cells}")
            figures[f"{trace.__name__}, {kept}"] = {
                policy: round(share, 4) for policy, (share, _) in found.items()
            }
    ratios = {
        f"junctions_over_{other}": sum(row["junctions"] for row in figures.values())
        / sum(row[other] for row in figures.values())
        for other in ("ends", "everything")
    }
    report("kept_windows", {"requests": count, "share_found": figures}, ratios)


if __name__ == "__main__":
    main()
