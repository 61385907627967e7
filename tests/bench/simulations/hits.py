"""Compares the prompt tokens that our prefix cache finds with those of vLLM's, on the same conversations.

``python -m tests.bench.simulations.hits [--quick]`` replays traces through both, without a device: look up,
allocate, prefill in chunks, decode token by token, free. vLLM's ``KVCacheManager`` has blocks of 16 tokens.
Ours has the shapes of a device's defaults, and hits as its chunks allow. Memory has room for everything, so
each difference comes from where hits may end.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scheduler_svc.kv.cache import CacheOptions, ChunkStarts
from scheduler_svc.shapes.buckets import prefill_buckets
from scheduler_svc.shapes.shape_config import ShapeConfig
from tests.bench.support.report import parser, report
from tests.support.scheduler import vllm_peer
from tests.support.scheduler.kv_cache_driver import KvCacheDriver

MAX_LEN, VLLM_BLOCK = 16_384, 16


@dataclass(frozen=True)
class Turn:
    """A request."""

    prompt: list[int]
    answer: list[int]


def _tokens(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(3, 30_000) for _ in range(count)]


def _conversations(
    dice: random.Random, count: int, *, alive: int, system: tuple[int, int], user: tuple[int, int],
    answer: tuple[int, int], turns: int,
) -> Iterator[Turn]:  # fmt: skip
    """Yields the turns of conversations under four system prompts; a new one replaces each that ends."""
    systems = [_tokens(dice, dice.randint(*system)) for _ in range(4)]
    chats = [(list(dice.choice(systems)), dice.randint(1, turns)) for _ in range(alive)]
    for _ in range(count):
        index = dice.randrange(alive)
        history, left = chats[index]
        prompt = history + _tokens(dice, dice.randint(*user))
        said = _tokens(dice, dice.randint(*answer))
        yield Turn(prompt, said)
        chats[index] = (prompt + said, left - 1) if left > 1 else (list(dice.choice(systems)), turns)


def short_chats(dice: random.Random, count: int) -> Iterator[Turn]:
    """Short system prompts and short turns: most of a prompt lies near the end of its hit."""
    yield from _conversations(
        dice, count, alive=20, system=(40, 200), user=(10, 60), answer=(20, 150), turns=12
    )


def chats(dice: random.Random, count: int) -> Iterator[Turn]:
    """Assistants with a page of instructions and answers of a page."""
    yield from _conversations(
        dice, count, alive=20, system=(300, 1500), user=(20, 200), answer=(100, 500), turns=12
    )


def agents(dice: random.Random, count: int) -> Iterator[Turn]:
    """Tools described at length, short calls, and results of any size."""
    yield from _conversations(
        dice, count, alive=8, system=(2000, 4000), user=(30, 600), answer=(20, 120), turns=15
    )


TRACES = (short_chats, chats, agents)


@dataclass(frozen=True)
class Contender:
    """Our cache with the defaults of a device."""

    chunk: int
    starts: ChunkStarts
    generated: bool = True


CONTENDERS = {
    "CPU, exact chunks": Contender(128, "exact"),
    "CPU, whole chunks": Contender(128, "whole"),
    "CUDA": Contender(512, "anywhere"),
    "CUDA, whole chunks": Contender(512, "whole"),
    "CUDA, whole chunks, prompts only": Contender(512, "whole", generated=False),
}
_BLOCK = 128
"""Tokens of a block by default, on CPUs and on GPUs."""


def _share(trace: list[Turn], cache: KvCacheDriver | vllm_peer.KvCachePeer) -> float:
    """Returns the share of prompt tokens found."""
    found = 0
    for index, turn in enumerate(trace):
        hit = cache.admit(f"r{index}", turn.prompt)
        assert hit is not None, "there is room for everything"
        assert cache.append(f"r{index}", turn.answer), "there is room for everything"
        cache.free(f"r{index}")
        found += hit
    return found / sum(len(turn.prompt) for turn in trace)


def _vllm(num_tokens: int) -> vllm_peer.KvCachePeer:
    return vllm_peer.KvCachePeer(
        (None,), num_blocks=num_tokens // VLLM_BLOCK, block_size=VLLM_BLOCK, max_model_len=MAX_LEN, chunk=2048
    )


def _ours(contender: Contender, num_tokens: int) -> KvCacheDriver:
    sizes = prefill_buckets("exp", chunk=contender.chunk, block_size=_BLOCK, minimum=64)
    shapes = ShapeConfig(MAX_LEN, 1, contender.chunk, _BLOCK, (1,), prefill_buckets=sizes)
    options = CacheOptions(chunk_starts=contender.starts, cache_generated=contender.generated)
    return KvCacheDriver((None,), shapes, num_tokens // _BLOCK, options)


def shares(make: Callable[[random.Random, int], Iterator[Turn]], count: int) -> dict[str, float]:
    """Returns the share of prompt tokens that each cache finds in a trace, by the cache's name."""
    trace = list(make(random.Random(1), count))
    room = 2 * sum(len(turn.prompt) + len(turn.answer) for turn in trace)
    found = {name: _share(trace, _ours(contender, room)) for name, contender in CONTENDERS.items()}
    return {"vLLM": _share(trace, _vllm(room)), **found}


def main() -> None:
    """Prints a table and the line of JSON; a ratio is our share divided by vLLM's."""
    count = 100 if parser(__doc__, "shorter traces").parse_args().quick else 600
    figures = {make.__name__: shares(make, count) for make in TRACES}
    print(f"{'share of prompt tokens found':<34}" + "".join(f"{name:>14}" for name in figures))
    for name in ("vLLM", *CONTENDERS):
        print(f"{name:<34}" + "".join(f"{row[name]:>14.3f}" for row in figures.values()))
    ratios = {
        f"{name}, {trace}": row[name] / row["vLLM"] for trace, row in figures.items() for name in CONTENDERS
    }
    report("hits", {"requests": count, "share_found": figures}, ratios)


if __name__ == "__main__":
    main()
