"""LoRA adapters give PEFT's greedy tokens in float32: alone, in a mixed batch, moved, after preemption."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from protos.errors import Unavailable
from protos.steps import Prefill
from tests.support import tiny_models
from tests.support.worker.harness import Harness, load, tokens_of
from tests.support.worker.peft_adapters import AdapterSpec, PeftReference, write_adapter
from worker_svc.lora.checkpoint import LoraLimits
from worker_svc.settings import Backend

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM, transformers and PEFT
]

SPECS: Mapping[str, AdapterSpec] = {
    "all": AdapterSpec(1),
    "stable": AdapterSpec(2, rank=15, targets=("q_proj", "v_proj"), options={"use_rslora": True}),
    "patterns": AdapterSpec(
        3,
        rank=4,
        targets=("k_proj", "o_proj", "up_proj", "down_proj"),
        options={"rank_pattern": {"down_proj": 9}, "alpha_pattern": {"layers.1.self_attn.o_proj": 3}},
    ),
}
LIMITS = LoraLimits(max_loras=3, max_rank=16, max_cpu_loras=3)
IDS = {name: number for number, name in enumerate(SPECS, start=1)}
LENGTHS = (5, 130, 64, 7, 40)


class _Model:
    """A base model, its adapters and PEFT's answers."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.folder = folder
        self.adapters = {name: write_adapter(folder, base / name, spec) for name, spec in SPECS.items()}
        self.reference = PeftReference(folder, self.adapters)
        vocabulary = self.reference._model.config.vocab_size
        generator = torch.Generator().manual_seed(1)
        self.prompts = [
            torch.randint(3, min(vocabulary, 40_000), (n,), generator=generator).tolist() for n in LENGTHS
        ]

    def harness(self, backend: Backend = "compiled") -> Harness:
        """A runner with every adapter on its host."""
        model = load(self.folder, "float32", compiled=backend != "eager", lora=LIMITS)
        harness = Harness(
            model, max_num_seqs=8, decode_buckets=(1, 2, 8), max_model_len=512, backend=backend,
            prefill_buckets=(32, 128),
        )  # fmt: skip
        for name, path in self.adapters.items():
            harness.load_adapter(IDS[name], path)
        return harness

    def check(self, adapters: Sequence[str | None], tokens: Sequence[Sequence[int]]) -> None:
        """Compares continuations of the first prompts with PEFT's."""
        found = [
            self.reference.mismatch(adapter, prompt, continuation)
            for adapter, prompt, continuation in zip(adapters, self.prompts, tokens, strict=False)
        ]
        assert [each for each in found if each] == []


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> _Model:
    base = tmp_path_factory.mktemp("qwen3")
    return _Model(tiny_models.write("qwen3", base / "model"), base)


def _id(adapter: str | None) -> int:
    return 0 if adapter is None else IDS[adapter]


def _generate(harness: Harness, model: _Model, adapters: Sequence[str | None], steps: int) -> list[list[int]]:
    """Generates for the first prompts in one decode batch, each with its adapter."""
    results = [
        [harness.prefill(slot, prompt, adapter_id=_id(adapter))]
        for slot, (prompt, adapter) in enumerate(zip(model.prompts, adapters, strict=False))
    ]
    slots = range(len(results))
    for _ in range(steps - 1):
        for result, output in zip(results, harness.decode(slots), strict=True):
            result.append(output)
    harness.release(slots)
    return [tokens_of(result) for result in results]


MIX = ("all", None, "stable", "patterns", "all")


@pytest.mark.parametrize("backend", ["compiled", "eager"])
def test_a_mixed_batch_equals_peft(qwen: _Model, backend: Backend) -> None:
    harness = qwen.harness(backend)
    tokens = _generate(harness, qwen, MIX, 8)
    qwen.check(MIX, tokens)
    base = _generate(harness, qwen, (None,) * len(MIX), 8)
    qwen.check((None,) * len(MIX), base)
    assert sum(one != other for one, other in zip(tokens, base, strict=True)) == len(MIX) - 1
    assert harness.runner.graphs.num_late == 0


def test_after_preemption_and_replay(qwen: _Model) -> None:
    """A request that is admitted again with its tokens goes on as PEFT does, its adapter in another slot."""
    harness = qwen.harness()
    prompt = qwen.prompts[1]
    tokens = tokens_of([harness.prefill(0, prompt, adapter_id=IDS["patterns"])])
    for _ in range(3):
        tokens += tokens_of(harness.decode([0]))
    harness.release([0])
    assert harness.adapters is not None
    harness.adapters.forget_slots()
    harness.prefill(0, prompt, adapter_id=IDS["all"])
    again = harness.prefill(5, [*prompt, *tokens], adapter_id=IDS["patterns"], num_prompt_tokens=len(prompt))
    tokens += tokens_of([again])
    for _ in range(4):
        tokens += tokens_of(harness.decode([5]))
    assert not qwen.reference.mismatch("patterns", prompt, tokens)


def test_after_unload_and_reload(qwen: _Model) -> None:
    """A slot holds nothing of the adapter before, and an adapter that is loaded again is the same."""
    harness = qwen.harness()
    assert harness.adapters is not None
    _generate(harness, qwen, ("all", "patterns", "stable"), 1)
    harness.adapters.unload(IDS["all"])
    harness.load_adapter(9, qwen.adapters["stable"])
    tokens = tokens_of(
        [harness.prefill(0, qwen.prompts[0], adapter_id=9)]
    )  # over "all", which has more layers
    for _ in range(5):
        tokens += tokens_of(harness.decode([0]))
    assert not qwen.reference.mismatch("stable", qwen.prompts[0], tokens)
    (output,) = harness.run(
        admit=[harness.admit(2, [5, 6], adapter_id=IDS["all"])], work=Prefill(2, 0, 2, sample=True)
    )
    assert isinstance(output.error, Unavailable)
    assert output.error.param == "adapter_id"
    harness.release([0])
    harness.load_adapter(IDS["all"], qwen.adapters["all"])
    qwen.check(("all",), _generate(harness, qwen, ("all",), 6))
