"""Attention over a paged cache of latent vectors, compared with attention computed token by token."""

import pytest
import torch

from worker_svc.devices import open_device, plain_attention
from worker_svc.devices.attention import AttentionCall, AttentionParams, PagedInput
from worker_svc.devices.cuda.device import CudaDevice
from worker_svc.shapes import AttentionLayer, KvGroup, group_layers

HEADS, LATENT, ROPE, BLOCK, BLOCKS = 3, 8, 4, 32, 7
SIZE = LATENT + ROPE
LAYER = AttentionLayer("a", HEADS, 1, SIZE, 0, torch.float32, latent=True)
GROUP = KvGroup(0, (LAYER,))
PARAMS = AttentionParams(HEADS, 1, SIZE, 0.3, 0, 0.0, writes=True, latent=LATENT)
TABLE = torch.tensor([[4, 2, 6], [5, 1, 0]], dtype=torch.int32)


def expected(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The heads' results [heads, latent] of one token that sees keys [tokens, SIZE]."""
    return (query @ keys.T * PARAMS.scale).softmax(dim=-1) @ keys[:, :LATENT]


@pytest.mark.parametrize("static", [False, True])
def test_chunks_and_decode_steps_attend_to_what_the_cache_holds(*, static: bool) -> None:
    """Each token sees its row's tokens up to itself, whether rows are read together or one by one."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.full(plain_attention.cache_shape(GROUP, BLOCKS, BLOCK) or (), torch.nan)
    histories = [torch.randn(70, SIZE, generator=generator), torch.randn(33, SIZE, generator=generator)]

    def run(step: PagedInput, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query = torch.randn(len(key), HEADS, SIZE, generator=generator)
        output = torch.full((len(key), HEADS, LATENT), torch.nan)
        plan = plain_attention.LatentPlan.of(step, block_size=0 if static else BLOCK)
        plain_attention.attend(AttentionCall(PARAMS, query, key[:, None], None, cache, output), plan)
        return query, output

    for row, keys in enumerate(histories):
        for start in range(0, len(keys) - 1, BLOCK):
            count = min(BLOCK, len(keys) - 1 - start)
            places = torch.zeros(BLOCK, dtype=torch.int64)
            places[:count] = TABLE[row, start // BLOCK] * BLOCK + torch.arange(count)
            step = PagedInput(
                torch.tensor([start + count], dtype=torch.int32), torch.tensor([0, count], dtype=torch.int32),
                TABLE[row : row + 1], places, count,
            )  # fmt: skip
            chunk = torch.zeros(BLOCK, SIZE)
            chunk[:count] = keys[start : start + count]
            query, output = run(step, chunk)
            assert output.isfinite().all()
            for token in range(count):
                wanted = expected(query[token], keys[: start + token + 1])
                assert torch.allclose(output[token], wanted, atol=1e-5)
    last = torch.tensor([len(keys) - 1 for keys in histories])
    places = TABLE.long().gather(1, last[:, None] // BLOCK)[:, 0] * BLOCK + last % BLOCK
    step = PagedInput((last + 1).int(), torch.arange(3, dtype=torch.int32), TABLE, places, 2)
    query, output = run(step, torch.stack([keys[-1] for keys in histories]))
    for row, keys in enumerate(histories):
        assert torch.allclose(output[row], expected(query[row], keys), atol=1e-5)


def test_a_latent_cache_takes_half_of_the_memory_and_a_group_of_its_own() -> None:
    """The group's cache has one vector a token, on CPUs and GPUs, and full attention stays apart."""
    plain = AttentionLayer("b", HEADS, 1, SIZE, 0, torch.float32)
    assert LAYER.bytes_per_token * 2 == plain.bytes_per_token
    groups = group_layers([LAYER, plain])
    assert [group.layers for group in groups] == [(plain,), (LAYER,)]
    for device in (open_device("cpu"), CudaDevice()):
        shape = device.cache_shape(GROUP, BLOCKS, BLOCK)
        assert shape == (BLOCKS, BLOCK, SIZE)
        assert torch.Size(shape).numel() * 4 == BLOCKS * BLOCK * GROUP.bytes_per_token
