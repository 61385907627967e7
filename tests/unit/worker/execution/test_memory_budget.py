"""The memory budget refuses what does not fit, with the numbers and a setting that would fit."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from protos.errors import ConfigurationRefused
from protos.service.settings import load
from protos.steps import GroupKind, PoolShape
from worker_svc.devices.cpu.device import CpuDevice
from worker_svc.execution.memory_budget import MemoryBudget, check_weights, free_memory, working_bytes
from worker_svc.execution.worker import Worker
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.settings import Settings
from worker_svc.shapes import AttentionLayer, KvGroup, ModelSize, PoolShapeConfig, ShapeConfig, group_layers

GIB = 2**30
# A Llama of 1B parameters, roughly.
SIZE = ModelSize(weight_bytes=3 * GIB, width=60_000, hidden_size=2048, vocab_size=128_000, itemsize=2)
SHAPES = ShapeConfig(4096, 8, 512, 128, (1, 2, 4, 8))


class SmallDevice(CpuDevice):
    """A device with `free` bytes free; `None` for a device that cannot tell."""

    def __init__(self, free: float | None) -> None:
        self._free = free

    def free_memory(self) -> int:
        if self._free is None:
            raise ConfigurationRefused("free memory is unknown; set --kv-memory")
        return int(self._free)


def make_budget(free: float | None, size: ModelSize = SIZE, **changed: Any) -> MemoryBudget:
    fields: dict[str, Any] = {"recorded": True, "kv_memory": None, "kv_share": 0.5, **changed}
    return MemoryBudget(SmallDevice(free), size, **fields)


def make_groups(windows: tuple[int, ...] = (0,)) -> tuple[KvGroup, ...]:
    layers = [AttentionLayer(f"l{i}.{w}", 32, 8, 64, w, torch.bfloat16) for w in windows for i in range(16)]
    return group_layers(layers, GroupKind.PAGED_WINDOW)


def cache_bytes(shapes: ShapeConfig, groups: tuple[KvGroup, ...]) -> int:
    return sum(
        count * group.bytes_per_token * shapes.block_size
        for count, group in zip(shapes.num_blocks, groups, strict=True)
    )


def refusal(
    budget: MemoryBudget, shapes: ShapeConfig = SHAPES, groups: tuple[KvGroup, ...] | None = None
) -> str:
    """The one line that refuses shapes."""
    with pytest.raises(ConfigurationRefused) as caught:
        budget.fit(shapes, groups or make_groups())
    assert "\n" not in caught.value.message
    return caught.value.message


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1])


def test_the_formula() -> None:
    """Recorded graphs add up, steps that take turns do not, and logits count once for the largest batch."""
    size = ModelSize(0, width=1000, hidden_size=10, vocab_size=50, itemsize=2)
    per_token = 1000 * 2 + 6 * 10 * 4
    assert working_bytes(size, (128, 1, 8), 8, recorded=True) == 137 * per_token + 8 * 50 * (2 + 4)
    assert working_bytes(size, (128, 1, 8), 8, recorded=False) == 128 * per_token + 8 * 50 * (2 + 4)


def test_each_prefill_bucket_is_a_graph() -> None:
    budget, groups = make_budget(GIB), make_groups((0, 512))
    buckets = replace(SHAPES, prefill_buckets=(128, 256, 512))
    taken = [cache_bytes(budget.fit(shapes, groups), groups) for shapes in (SHAPES, buckets)]
    more = working_bytes(SIZE, (128, 256), 0, recorded=True)
    assert taken[0] - taken[1] == pytest.approx(more * budget.kv_share, abs=GIB // 50)


def test_the_cache_takes_its_share_of_what_graphs_leave() -> None:
    """A larger --kv-share gives more blocks, up to what all slots can use."""
    groups = make_groups((0, 512))
    graphs = working_bytes(SIZE, (512, 1, 2, 4, 8), 8, recorded=True)
    fitted = make_budget(GIB, kv_share=0.5).fit(SHAPES, groups)
    taken = cache_bytes(fitted, groups)
    assert taken <= (GIB - graphs) * 0.5 < taken + GIB // 20
    assert cache_bytes(make_budget(GIB, kv_share=0.9).fit(SHAPES, groups), groups) > taken
    assert make_budget(1000 * GIB).fit(SHAPES, groups) == make_budget(2000 * GIB).fit(SHAPES, groups)


def test_kv_memory_is_used_as_given() -> None:
    groups = make_groups()
    fitted = make_budget(2 * GIB, kv_memory=0.75).fit(SHAPES, groups)
    taken = cache_bytes(fitted, groups)
    assert 0.7 * GIB < taken <= 0.75 * GIB


def test_too_much_kv_memory_names_how_much_would_fit() -> None:
    text = refusal(make_budget(0.5 * GIB, kv_memory=3))
    assert text.startswith("device cpu has 0.5 GiB free beside 3 GiB of weights, but 1 GiB of KV cache and ")
    fits = number(r"; --kv-memory ([\d.]+) would$", text)
    assert 0.3 < fits < 0.5
    assert make_budget(0.5 * GIB, kv_memory=fits).fit(SHAPES, make_groups()).num_blocks


def test_too_many_blocks_name_how_many_would_fit() -> None:
    groups = make_groups((0, 512))
    requested = replace(SHAPES, num_blocks=(500, 500))
    fits = int(number(r"; --num-blocks (\d+) would$", refusal(make_budget(GIB), requested, groups)))
    budget = make_budget(GIB)
    fitting = replace(SHAPES, num_blocks=(fits, fits))
    assert budget.fit(fitting, groups) == fitting
    refusal(budget, replace(SHAPES, num_blocks=(fits + 1, fits + 1)), groups)


def test_a_sequence_that_is_too_long_names_the_length_that_fits() -> None:
    text = refusal(make_budget(0.3 * GIB, kv_share=0.4))
    assert text.startswith("one sequence of 4096 tokens needs 128 MiB of KV cache")
    fits = int(number(r"lower --max-model-len to (\d+)$", text))
    assert fits % SHAPES.block_size == 0
    assert (
        make_budget(0.3 * GIB, kv_share=0.4)
        .fit(replace(SHAPES, max_model_len=fits), make_groups())
        .num_blocks
    )
    refusal(make_budget(0.3 * GIB, kv_share=0.4), replace(SHAPES, max_model_len=fits + SHAPES.block_size))


@pytest.mark.parametrize(
    ("shapes", "flag"),
    [
        (replace(SHAPES, chunk=8192), "--max-num-batched-tokens"),
        (replace(SHAPES, chunk=4096, prefill_buckets=(512, 1024, 2048, 4096)), "--max-num-batched-tokens"),
        (replace(SHAPES, max_num_seqs=2048, decode_buckets=(1024, 2048)), "--max-num-seqs"),
    ],
)
def test_oversized_graphs_name_the_setting_to_lower(shapes: ShapeConfig, flag: str) -> None:
    text = refusal(make_budget(GIB), shapes)
    assert re.match(r"device cpu has 1 GiB free beside 3 GiB of weights, but graphs need [\d.]+ GiB; ", text)
    buckets = "--decode-buckets" if flag == "--max-num-seqs" else "--prefill-buckets"
    assert int(number(rf"; {flag} (\d+) would fit, with {buckets} up to it if they are set$", text)) >= 128
    assert refusal(make_budget(1000), shapes).endswith("use a smaller model or a device with more memory")


def test_a_suggested_chunk_lines_up_with_blocks() -> None:
    text = refusal(make_budget(GIB), replace(SHAPES, chunk=6144, block_size=2048))
    assert number(r"; --max-num-batched-tokens (\d+) would fit", text) == 2048


def test_without_recording_only_the_largest_step_counts() -> None:
    """Steps that take turns in the same memory leave more for the cache."""
    wide = replace(SHAPES, chunk=2048, decode_buckets=(8,))
    enough = working_bytes(SIZE, (2048, 8), 8, recorded=False) + GIB // 2
    assert make_budget(enough, recorded=False).fit(wide, make_groups()).num_blocks


def test_a_report_without_free_memory_has_the_rest() -> None:
    """A device that cannot tell its free memory keeps no figure of the worker from metrics."""
    worker = Worker(load(Settings, ["--model=any"]))
    worker.device = SmallDevice(None)
    report = worker.report()
    assert (report.free_memory_bytes, report.process_memory_bytes > 0) == (0, True)


def test_unknown_free_memory_needs_a_setting() -> None:
    """A device that cannot tell its free memory needs --kv-memory or --num-blocks, and accepts any value."""
    assert free_memory(SmallDevice(None)) is None
    assert refusal(make_budget(None)) == "free memory is unknown; set --kv-memory"
    assert make_budget(None, kv_memory=1).fit(SHAPES, make_groups()).num_blocks
    requested = replace(SHAPES, num_blocks=(40,))
    assert make_budget(None).fit(requested, make_groups()) == requested


def test_pooling_needs_memory_for_its_steps() -> None:
    """A pooling model has no cache. Recorded graphs of all shapes must fit, or else the largest step."""
    shapes = PoolShapeConfig((PoolShape(4096, 1), PoolShape(512, 64)))
    make_budget(8 * GIB).check_pooling(shapes)
    make_budget(None).check_pooling(shapes)
    recorded = working_bytes(SIZE, (4096, 512 * 64), 0, recorded=True)
    largest = working_bytes(SIZE, (512 * 64,), 0, recorded=True)
    make_budget(recorded).check_pooling(shapes)
    with pytest.raises(ConfigurationRefused, match=r"graphs of 2 shapes need .* lower --pool-batch-sizes"):
        make_budget(recorded - 1).check_pooling(shapes)
    make_budget(largest, recorded=False).check_pooling(shapes)
    with pytest.raises(
        ConfigurationRefused, match=r"a step of 32768 tokens needs .* lower --pool-batch-sizes"
    ):
        make_budget(largest - 1, recorded=False).check_pooling(shapes)


def test_oversized_weights_are_refused_by_their_headers(tmp_path: Path) -> None:
    """The check counts bytes after conversion to --dtype; for auto it assumes the smallest type."""
    save_file({"a": torch.zeros(1000, dtype=torch.float32)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    for dtype, needed in (("float32", 4000), ("bfloat16", 2000), ("auto", 2000)):
        check_weights(checkpoint, dtype, SmallDevice(needed))
        check_weights(checkpoint, dtype, SmallDevice(None))
        with pytest.raises(ConfigurationRefused, match=r"the weights need .* use a smaller model") as caught:
            check_weights(checkpoint, dtype, SmallDevice(needed - 1))
        assert ("--dtype bfloat16" in caught.value.message) == (dtype == "float32")
