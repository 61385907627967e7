"""The KV cache: the size of a block over all layers, copies and clears."""

import pytest
import torch

from protos.steps import BlockCopy, GroupKind
from worker_svc.devices.cpu.device import CpuDevice
from worker_svc.execution.kv_cache import KvCache
from worker_svc.shapes import AttentionLayer, group_layers

BLOCK = 32


@pytest.fixture
def cache() -> KvCache:
    """Two layers with full attention and 4 blocks; one layer with a window and 3 blocks."""
    layers = [
        AttentionLayer(name, 4, 2, 32, window, torch.bfloat16)
        for name, window in (("a", 0), ("b", 0), ("w", 64))
    ]
    return KvCache(CpuDevice(), group_layers(layers), BLOCK, (4, 3))


def test_bytes_per_block_count_all_layers(cache: KvCache) -> None:
    one_layer = 2 * 2 * 32 * 2 * BLOCK
    assert cache.bytes_per_block == (2 * one_layer, one_layer)
    assert cache.by_layer()["w"][0].nbytes == one_layer


def test_a_copy_covers_all_layers_of_one_group(cache: KvCache) -> None:
    """After a copy the target equals the source in each of the group's layers; nothing else changes."""
    layers = cache.by_layer()
    for number, tensor in enumerate(layers.values()):
        tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape) + number)
    before = {name: tensor.clone() for name, tensor in layers.items()}
    cache.copy([BlockCopy(0, 1, 3, 7)])
    for name in ("a", "b"):
        assert torch.equal(layers[name][3], before[name][1])
        assert torch.equal(layers[name][:3], before[name][:3])
    assert torch.equal(layers["w"], before["w"])


def test_an_in_place_block_holds_one_window() -> None:
    """Its size is one window, whatever the size of paged blocks; it is copied and cleared like any block."""
    layers = [AttentionLayer(name, 4, 2, 32, 64, torch.bfloat16) for name in ("v", "w")]
    groups = group_layers(
        [*layers, AttentionLayer("a", 4, 2, 32, 0, torch.bfloat16)], GroupKind.IN_PLACE_WINDOW
    )
    cache = KvCache(CpuDevice(), groups, 128, (2, 3))
    one_layer = 2 * 2 * 32 * 2 * 64
    assert cache.bytes_per_block == (2 * one_layer, 2 * one_layer)
    tensors = cache.by_layer()
    assert tensors["v"][0].nbytes == one_layer
    for number, name in enumerate("vw", start=1):
        tensors[name][1] = number
    cache.copy([BlockCopy(1, 1, 2, 64)])
    cache.clear(1, [1])
    for number, name in enumerate("vw", start=1):
        assert not tensors[name][:2].any()
        assert (tensors[name][2] == number).all()
    assert not tensors["a"].any()


def test_copies_happen_in_order(cache: KvCache) -> None:
    tensor = cache.by_layer()["a"]
    tensor[1] = 5
    cache.copy([BlockCopy(0, 1, 2, BLOCK), BlockCopy(0, 2, 3, BLOCK)])
    assert (tensor[3] == 5).all()


def test_cleared_blocks_are_zero_in_all_layers_of_one_group(cache: KvCache) -> None:
    layers = cache.by_layer()
    for tensor in layers.values():
        tensor.fill_(torch.nan)
    cache.clear(0, [1, 3])
    for name in ("a", "b"):
        assert not layers[name][[1, 3]].any()
        assert layers[name][[0, 2]].isnan().all()
    assert layers["w"].isnan().all()
