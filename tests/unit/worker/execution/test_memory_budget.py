"""What does not fit a device is refused with the numbers, and with the setting that would fit."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from protos.errors import ConfigurationRefused
from worker_svc.devices.cpu import CpuDevice
from worker_svc.execution.memory_budget import Budget, ModelSize, check_weights, free_memory, working_bytes
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.plans.geometry import (
    AttentionLayer,
    Geometry,
    GroupKind,
    KvGroup,
    PoolGeometry,
    PoolShape,
    group_layers,
)

GIB = 2**30
# A Llama of 1B parameters, roughly.
SIZE = ModelSize(weight_bytes=3 * GIB, width=60_000, hidden_size=2048, vocab_size=128_000, itemsize=2)
GEOMETRY = Geometry(4096, 8, 512, 128, (1, 2, 4, 8))


class SmallDevice(CpuDevice):
    """A device with so many bytes free, or one that does not say."""

    def __init__(self, free: float | None) -> None:
        self._free = free

    def free_memory(self) -> int:
        if self._free is None:
            raise ConfigurationRefused("it does not say; set --kv-memory")
        return int(self._free)


def budget(free: float | None, size: ModelSize = SIZE, **changed: Any) -> Budget:
    fields: dict[str, Any] = {"recorded": True, "kv_memory": None, "kv_share": 0.5, **changed}
    return Budget(SmallDevice(free), size, **fields)


def make_groups(windows: tuple[int, ...] = (0,)) -> tuple[KvGroup, ...]:
    layers = [AttentionLayer(f"l{i}.{w}", 32, 8, 64, w, torch.bfloat16) for w in windows for i in range(16)]
    return group_layers(layers, GroupKind.PAGED_WINDOW)


def cache_bytes(geometry: Geometry, groups: tuple[KvGroup, ...]) -> int:
    return sum(
        count * group.bytes_per_token * geometry.block_size
        for count, group in zip(geometry.num_blocks, groups, strict=True)
    )


def reason(what: Budget, geometry: Geometry = GEOMETRY, groups: tuple[KvGroup, ...] | None = None) -> str:
    """Why it is refused; one line."""
    with pytest.raises(ConfigurationRefused) as caught:
        what.fit(geometry, groups or make_groups())
    assert "\n" not in caught.value.message
    return caught.value.message


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1])


def test_the_formula() -> None:
    """Recorded graphs add up, steps that take turns do not; logits are those of the largest batch."""
    size = ModelSize(0, width=1000, hidden_size=10, vocab_size=50, itemsize=2)
    per_token = 1000 * 2 + 6 * 10 * 4
    assert working_bytes(size, (128, 1, 8), 8, recorded=True) == 137 * per_token + 8 * 50 * (2 + 4)
    assert working_bytes(size, (128, 1, 8), 8, recorded=False) == 128 * per_token + 8 * 50 * (2 + 4)


def test_blocks_follow_from_what_is_left() -> None:
    """The cache takes its share of what graphs leave."""
    groups = make_groups((0, 512))
    graphs = working_bytes(SIZE, (512, 1, 2, 4, 8), 8, recorded=True)
    fitted = budget(GIB, kv_share=0.5).fit(GEOMETRY, groups)
    taken = cache_bytes(fitted, groups)
    assert taken <= (GIB - graphs) * 0.5 < taken + GIB // 20
    assert cache_bytes(budget(GIB, kv_share=0.9).fit(GEOMETRY, groups), groups) > taken
    # No more than all slots can use, however much there is.
    assert budget(1000 * GIB).fit(GEOMETRY, groups) == budget(2000 * GIB).fit(GEOMETRY, groups)


def test_asked_memory_is_taken_whole() -> None:
    """--kv-memory is neither shared nor cut."""
    groups = make_groups()
    fitted = budget(2 * GIB, kv_memory=0.75).fit(GEOMETRY, groups)
    taken = cache_bytes(fitted, groups)
    assert 0.7 * GIB < taken <= 0.75 * GIB


def test_too_much_kv_memory_names_how_much_would_fit() -> None:
    """And that much does."""
    text = reason(budget(0.5 * GIB, kv_memory=3))
    assert text.startswith("beside 3 GiB of weights device cpu has 0.5 GiB free, and 1 GiB of KV cache and ")
    fits = number(r"; --kv-memory ([\d.]+) would$", text)
    assert 0.3 < fits < 0.5
    assert budget(0.5 * GIB, kv_memory=fits).fit(GEOMETRY, make_groups()).num_blocks


def test_too_many_blocks_name_how_many_would_fit() -> None:
    """One number for all groups; one more would not fit."""
    groups = make_groups((0, 512))
    asked = replace(GEOMETRY, num_blocks=(500, 500))
    fits = int(number(r"; --num-blocks (\d+) would$", reason(budget(GIB), asked, groups)))
    what = budget(GIB)
    fitting = replace(GEOMETRY, num_blocks=(fits, fits))
    assert what.fit(fitting, groups) == fitting
    reason(what, replace(GEOMETRY, num_blocks=(fits + 1, fits + 1)), groups)


def test_a_sequence_that_is_too_long_names_the_length_that_fits() -> None:
    """In whole blocks."""
    text = reason(budget(0.3 * GIB, kv_share=0.4))
    assert text.startswith("one sequence of 4096 tokens needs 128 MiB of KV cache")
    fits = int(number(r"lower --max-model-len to (\d+)$", text))
    assert fits % GEOMETRY.block_size == 0
    assert (
        budget(0.3 * GIB, kv_share=0.4).fit(replace(GEOMETRY, max_model_len=fits), make_groups()).num_blocks
    )
    reason(budget(0.3 * GIB, kv_share=0.4), replace(GEOMETRY, max_model_len=fits + GEOMETRY.block_size))


@pytest.mark.parametrize(
    ("geometry", "flag"),
    [
        (replace(GEOMETRY, chunk=8192), "--max-num-batched-tokens"),
        (replace(GEOMETRY, max_num_seqs=2048, decode_buckets=(1024, 2048)), "--max-num-seqs"),
    ],
)
def test_graphs_that_are_too_large_name_what_is_too_large(geometry: Geometry, flag: str) -> None:
    """The chunk or the batch, and a size of it with which graphs fit."""
    text = reason(budget(GIB), geometry)
    assert re.match(r"beside 3 GiB of weights device cpu has 1 GiB free, and graphs need [\d.]+ GiB; ", text)
    assert int(number(rf"; {flag} (\d+) would fit$", text)) >= 128
    assert reason(budget(1000), geometry).endswith("use a smaller model or a device with more memory")


def test_without_recording_the_largest_step_counts() -> None:
    """So that more fits."""
    wide = replace(GEOMETRY, chunk=2048, decode_buckets=(8,))
    enough = working_bytes(SIZE, (2048, 8), 8, recorded=False) + GIB // 2
    assert budget(enough, recorded=False).fit(wide, make_groups()).num_blocks


def test_a_device_that_does_not_say() -> None:
    """Is believed what it is told to hold, and must be told."""
    assert free_memory(SmallDevice(None)) is None
    assert reason(budget(None)) == "it does not say; set --kv-memory"
    assert budget(None, kv_memory=1).fit(GEOMETRY, make_groups()).num_blocks
    asked = replace(GEOMETRY, num_blocks=(40,))
    assert budget(None).fit(asked, make_groups()) == asked


def test_pooling_shapes() -> None:
    """Their largest step has to fit; there is no cache."""
    geometry = PoolGeometry((PoolShape(1, 4096), PoolShape(64, 512)))
    budget(8 * GIB).fit_pool(geometry)
    budget(None).fit_pool(geometry)
    with pytest.raises(
        ConfigurationRefused, match=r"a step of 32768 tokens needs .* lower --pool-batch-sizes"
    ):
        budget(GIB).fit_pool(geometry)


def test_weights_are_refused_before_they_are_read(tmp_path: Path) -> None:
    """From headers alone, in the type that they will have; the least of what auto may mean."""
    save_file({"a": torch.zeros(1000, dtype=torch.float32)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    for dtype, needed in (("float32", 4000), ("bfloat16", 2000), ("auto", 2000)):
        check_weights(checkpoint, dtype, SmallDevice(needed))
        check_weights(checkpoint, dtype, SmallDevice(None))
        with pytest.raises(ConfigurationRefused, match=r"the weights need .* use a smaller model") as caught:
            check_weights(checkpoint, dtype, SmallDevice(needed - 1))
        assert ("--dtype bfloat16" in caught.value.message) == (dtype == "float32")
