"""The GPU threshold search agrees with the histogram search, on a GPU or in Triton's interpreter."""

import pytest
import torch

from worker_svc.sampling import triton_search
from worker_svc.sampling.filters import find_threshold
from worker_svc.sampling.workspace import Workspace

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ONE = 2.0**44
# Each row takes Triton's interpreter long. A vocabulary above 2,048 tokens has two programs per row.
SIZES = [
    *((1, 3.0), (7, 40.0), (2048, 0.01), (2500, 3.0)),
    *(
        pytest.param(*size, marks=pytest.mark.slow)
        for size in (
            *(
                (1, 0.01),
                (1, 40.0),
                (7, 0.01),
                (7, 3.0),
                (2048, 3.0),
                (2048, 40.0),
                (2500, 0.01),
                (2500, 40.0),
            ),
            *((5001, 0.01), (5001, 3.0), (5001, 40.0)),
        )
    ),
]


def both(
    weights: torch.Tensor, measure: torch.Tensor | None, wanted: torch.Tensor
) -> tuple[list[int], list[int]]:
    """Returns the thresholds that histograms and kernels find; 0 if all tokens are above."""
    bits = weights.contiguous().view(torch.int32)
    rows, vocab = weights.shape
    ((_, tile),) = Workspace(rows, vocab, torch.device("cpu")).tiles(rows)
    expected = find_threshold(bits, measure, wanted, tile)
    found = triton_search.find_threshold(
        bits.to(DEVICE), measure if measure is None else measure.to(DEVICE), wanted.to(DEVICE)
    )
    return [each.clamp_(min=0)[:, 0].tolist() for each in (expected, found.cpu())]  # type: ignore[return-value]


@pytest.mark.parametrize(("vocab", "scale"), SIZES)
def test_the_nucleus_matches_the_histogram_search(vocab: int, scale: float) -> None:
    """Rows are flat, usual or steep, with bfloat16 ties and with dropped tokens, which have no mass."""
    torch.manual_seed(vocab)
    logits = (torch.randn(4, vocab) * scale).bfloat16().float()
    weights = (logits - logits.amax(dim=1, keepdim=True)).exp()
    mass = (weights * ONE).long()
    mass[2, ::3] = 0
    total = mass.sum(dim=1, keepdim=True)
    share = torch.tensor([[0.5], [0.9], [1.0], [1e-9]], dtype=torch.float64)
    wanted = torch.minimum((share * total).ceil().long(), total).clamp(min=1)
    expected, found = both(weights, mass, wanted)
    assert found == expected
    reached = (mass * (weights.view(torch.int32) >= torch.tensor(found)[:, None])).sum(dim=1, keepdim=True)
    assert (reached >= torch.minimum(wanted, total)).all()


@pytest.mark.parametrize(
    "vocab", [1, 7, *(pytest.param(size, marks=pytest.mark.slow) for size in (2500, 5001))]
)
def test_the_kth_weight_matches_the_histogram_search(vocab: int) -> None:
    """Each token counts as one; a k beyond the vocabulary finds all tokens."""
    torch.manual_seed(vocab)
    weights = torch.rand(4, vocab).bfloat16().float()
    wanted = torch.tensor([[1], [min(vocab, 70)], [vocab], [vocab + 1]])
    expected, found = both(weights, None, wanted)
    assert found == expected
    assert found[3] == 0
    for row, count in zip(range(3), wanted[:3, 0].tolist(), strict=True):
        assert found[row] == int(weights[row].view(torch.int32).sort(descending=True).values[count - 1])


def test_the_largest_weight_is_found() -> None:
    weights = torch.tensor([[0.25, 1.0, 0.0]])
    expected, found = both(weights, (weights * ONE).long(), torch.ones(1, 1, dtype=torch.int64))
    assert found == expected == [0x3F800000]
