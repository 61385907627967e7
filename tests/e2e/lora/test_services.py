"""LoRA adapters through a real scheduler and workers: one rank and several, a lost worker, unload, reload."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import tiny_models
from tests.support.ranks.questions import GREEDY, PROMPTS
from tests.support.ranks.replica import Replica, replica
from tests.support.worker.peft_adapters import AdapterSpec, PeftReference, write_adapter

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),  # importing transformers and PEFT
]

SPECS: Mapping[str, AdapterSpec] = {
    "one": AdapterSpec(1),
    "two": AdapterSpec(2, rank=4, targets=("q_proj", "v_proj")),
    "three": AdapterSpec(
        3, rank=16, targets=("o_proj", "gate_proj", "down_proj"), options={"use_rslora": True}
    ),
}
FLAGS = ("--dtype", "float32", "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "2")
MIX = ("one", "", "two", "three")
COUNT = 24


class Adapted:
    """A model, its adapters and PEFT's answers."""

    def __init__(self, base: Path) -> None:
        self.model = tiny_models.write("llama", base / "model")
        self.adapters = {name: write_adapter(self.model, base / name, spec) for name, spec in SPECS.items()}
        self.reference = PeftReference(self.model, self.adapters)

    def check_mix(self, running: Replica, adapters: Sequence[str] = MIX, count: int = COUNT) -> None:
        """Asks for every prompt with its adapter at the same time. `MIX` has more adapters than slots."""
        with ThreadPoolExecutor(len(adapters)) as pool:
            answers = pool.map(
                lambda prompt, lora: running.generate(prompt, count, GREEDY, lora=lora), PROMPTS, adapters
            )
            tokens = [sequence for (sequence,) in answers]
        found = [
            self.reference.mismatch(lora or None, prompt, sequence)
            for lora, prompt, sequence in zip(adapters, PROMPTS, tokens, strict=True)
        ]
        assert [each for each in found if each] == []


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"))


def _modules(adapted: Adapted) -> tuple[str, ...]:
    return ("--lora-modules", *(f"{name}={path}" for name, path in adapted.adapters.items()))


def test_preempted_requests_keep_their_adapters(adapted: Adapted, tmp_path: Path) -> None:
    """On two stages, long answers displace one another's blocks, and go on as PEFT does alone."""
    with replica(
        adapted.model, tmp_path, pipeline=2, flags=FLAGS,
        scheduler_flags=("--num-blocks", "14", *_modules(adapted)),
    ) as running:  # fmt: skip
        adapted.check_mix(running, adapters=("one", "two", "two", "one"), count=150)
        assert running.count("triptych:preemptions_total") > 0


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_every_layout_equals_peft(adapted: Adapted, tmp_path: Path, tensor: int, pipeline: int) -> None:
    """Three adapters take turns in two slots, on host and device; prefixes of one serve no other."""
    with replica(
        adapted.model, tmp_path, tensor=tensor, pipeline=pipeline, flags=FLAGS, scheduler_flags=_modules(adapted)
    ) as running:  # fmt: skip
        for _ in range(2):
            adapted.check_mix(running)
        # The same prompt under every adapter: what the cache has of one is not the others'.
        for lora in MIX:
            (tokens,) = running.generate(PROMPTS[1], COUNT, GREEDY, lora=lora)
            assert not adapted.reference.mismatch(lora or None, PROMPTS[1], tokens)
