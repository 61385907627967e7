"""Models reuse prefixes, whatever their attention, and outputs stay the same bit for bit."""

from pathlib import Path

import pytest
import torch

from protos.steps import GroupKind
from protos.triptych.v1 import common_pb2
from tests.support.scheduler.factories import ListSink
from tests.support.scheduler.local_replica import LocalReplica
from tests.support.worker.harness import load
from tests.support.zoo import families
from worker_svc.devices.cpu.kernels.ops import product_kernels

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
]


@pytest.mark.parametrize(
    ("family", "window", "block_size"),
    [
        ("deepseek-v2", GroupKind.PAGED_WINDOW, 128),
        ("mistral", GroupKind.PAGED_WINDOW, 128),
        ("mistral", GroupKind.IN_PLACE_WINDOW, 128),
        pytest.param("llama", GroupKind.PAGED_WINDOW, 512, marks=pytest.mark.slow),
        pytest.param("gemma3", GroupKind.PAGED_WINDOW, 32, marks=pytest.mark.slow),
        pytest.param("gemma3", GroupKind.IN_PLACE_WINDOW, 512, marks=pytest.mark.slow),
        pytest.param("gpt-oss", GroupKind.IN_PLACE_WINDOW, 128, marks=pytest.mark.slow),
    ],
)
def test_a_prefix_is_reused_and_nothing_changes(
    family: str, window: GroupKind, block_size: int, tmp_path: Path
) -> None:
    """A second prompt reuses the first one's two chunks, and decodes past the window as without a cache."""
    model = load(families.write(family, tmp_path), "float32")
    shared = [3 + (i * i * 31 + i * 17) % 250 for i in range(256)]
    prompts = [[*shared, *(7 + (i * k) % 240 for i in range(40))] for k in (11, 13)]
    answers: dict[bool, list[tuple[list[int], list[common_pb2.TokenLogprobs]]]] = {}
    for caching in (True, False):
        replica = LocalReplica(model, window=window, block_size=block_size, caching=caching)
        answers[caching] = []
        for number, prompt in enumerate(prompts):
            sink = ListSink()
            replica.submit(prompt, sink, num_tokens=80, logprobs=0)
            while replica.step():
                replica.scheduler.kv.check_integrity()
            assert sink.events[-1].error is None
            assert sink.events[0].num_cached_tokens == (len(shared) if caching and number else 0)
            logprobs = [entry for event in sink.events for entry in event.logprobs]
            answers[caching].append((sink.tokens, logprobs))
    assert answers[True] == answers[False]
    assert len(set(answers[True][1][0])) > 1


@pytest.mark.skipif(product_kernels(torch.bfloat16) is None, reason="our kernels do not run here")
@pytest.mark.parametrize("family", ["llama", pytest.param("mistral", marks=pytest.mark.slow)])
def test_a_conversation_reuses_what_was_said_and_nothing_changes(family: str, tmp_path: Path) -> None:
    """With exact chunks, a hit ends inside an answer, in the middle of a block, and costs no bit."""
    model = load(families.write(family, tmp_path), "bfloat16")
    answers: dict[bool, list[tuple[list[int], list[common_pb2.TokenLogprobs]]]] = {}
    for caching in (True, False):
        replica = LocalReplica(model, caching=caching, exact=True)
        history = [3 + (i * i * 31 + i * 17) % 250 for i in range(500)]
        answers[caching] = []
        for turn in range(4):
            sink = ListSink()
            replica.submit(history, sink, num_tokens=45, logprobs=3)
            while replica.step():
                replica.scheduler.kv.check_integrity()
            said = sink.tokens
            assert sink.events[-1].error is None
            # The last token of the last answer was not computed.
            known = len(history) - 24 if turn else 0
            assert sink.events[0].num_cached_tokens == (known // 32 * 32 if caching else 0)
            answers[caching].append((said, [entry for event in sink.events for entry in event.logprobs]))
            history = [*history, *said, *(7 + (i * (turn + 11)) % 240 for i in range(23))]
    assert answers[True] == answers[False]
