"""A rank is killed or frozen under load: its replica ends, forms again, and no request loses a token."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGSTOP

import pytest

from tests.support import tiny_models
from tests.support.ranks.replica import Replica, replica

PROMPTS = [
    [3 + (7 * row + place) % 200 for place in range(length)] for row, length in enumerate((4, 30, 70, 150))
]
COUNT = 300
GREEDY = {"temperature": 0.0}

Layout = tuple[str, int, int]
"""A family of models, the ranks of a stage, and the stages."""

TENSOR, PIPELINE, EXPERTS, BOTH = ("llama", 2, 1), ("llama", 1, 2), ("mixtral", 2, 1), ("llama", 2, 2)
CASES = [
    (TENSOR, 0, SIGKILL),
    (TENSOR, 1, SIGSTOP),
    (PIPELINE, 0, SIGSTOP),
    (PIPELINE, 1, SIGKILL),
    (EXPERTS, 1, SIGKILL),
    (BOTH, 2, SIGSTOP),
]

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]


@dataclass
class Running:
    """A replica, and its answers while nothing goes wrong."""

    replica: Replica
    expected: list[list[int]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Layout], Running]]:
    """Returns the replica of a layout. It forms again after each test, so the next one need not start it."""
    running: dict[Layout, Running] = {}
    with ExitStack() as stack:

        def start(layout: Layout) -> Running:
            if layout not in running:
                stack.close()
                running.clear()
                folder = tmp_path_factory.mktemp("lost")
                running[layout] = stack.enter_context(_run(layout, folder))
            return running[layout]

        yield start


@contextmanager
def _run(layout: Layout, folder: Path) -> Iterator[Running]:
    family, tensor, pipeline = layout
    model = tiny_models.write(family, folder / "model")
    experts = ("--enable-expert-parallel",) if family in tiny_models.EXPERT_FAMILIES else ()
    with replica(
        model, folder, tensor=tensor, pipeline=pipeline, flags=("--dtype", "float32", *experts),
        scheduler_flags=("--step-timeout-s", "20"),
    ) as ranks:  # fmt: skip
        yield Running(ranks, ranks.generate_all(PROMPTS, COUNT, GREEDY))


@pytest.mark.parametrize(
    ("layout", "rank", "sent"),
    CASES,
    ids=lambda part: "-".join(map(str, part)) if isinstance(part, tuple) else getattr(part, "name", None),
)
def test_a_lost_rank_loses_no_request(
    start: Callable[[Layout], Running], layout: Layout, rank: int, sent: signal.Signals
) -> None:
    """The other ranks end by themselves, the group forms again, and requests go on with equal tokens."""
    running = start(layout)
    ranks = running.replica
    # The scheduler finds a hang soon once it knows how long the steps of a new group take.
    assert ranks.generate_all(PROMPTS, COUNT, GREEDY) == running.expected
    started = [threading.Event() for _ in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        requests = [
            pool.submit(ranks.generate, prompt, COUNT, GREEDY, started=event)
            for prompt, event in zip(PROMPTS, started, strict=True)
        ]
        assert all(event.wait(120) for event in started)
        ranks.lose(rank, sent)
        assert [request.result() for request in requests] == [[tokens] for tokens in running.expected]
