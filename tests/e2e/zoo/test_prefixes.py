"""Models without any layer that keeps a whole sequence in keys and values reuse prefixes, too."""

from pathlib import Path

import pytest

from protos.steps import GroupKind
from tests.support.scheduler.factories import ListSink
from tests.support.scheduler.local_replica import LocalReplica
from tests.support.worker.harness import load
from tests.support.zoo import families

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
]


@pytest.mark.parametrize(
    ("family", "window"),
    [
        ("deepseek-v2", GroupKind.PAGED_WINDOW),
        ("mistral", GroupKind.PAGED_WINDOW),
        ("mistral", GroupKind.IN_PLACE_WINDOW),
        pytest.param("gpt-oss", GroupKind.IN_PLACE_WINDOW, marks=pytest.mark.slow),
    ],
)
def test_a_prefix_is_reused_and_nothing_changes(family: str, window: GroupKind, tmp_path: Path) -> None:
    """A second prompt reuses the first one's two chunks, and decodes past the window as without a cache."""
    model = load(families.write(family, tmp_path), "float32")
    shared = [3 + (i * i * 31 + i * 17) % 250 for i in range(256)]
    prompts = [[*shared, *(7 + (i * k) % 240 for i in range(40))] for k in (11, 13)]
    answers: dict[bool, list[list[int]]] = {}
    for caching in (True, False):
        replica = LocalReplica(model, window=window, block_size=128, caching=caching)
        answers[caching] = []
        for number, prompt in enumerate(prompts):
            sink = ListSink()
            replica.submit(prompt, sink, num_tokens=80)
            while replica.step():
                replica.scheduler.kv.check_integrity()
            assert sink.events[-1].error is None
            assert sink.events[0].num_cached_tokens == (len(shared) if caching and number else 0)
            answers[caching].append(sink.tokens)
    assert answers[True] == answers[False]
    assert len(set(answers[True][1])) > 1
