"""Which part of a model a rank has."""

import pytest

from worker_svc.ranks.layout import RankLayout


def test_ranks_are_numbered_stage_by_stage() -> None:
    """Rank 3 of two stages of two is the second rank of the last stage."""
    layout = RankLayout(3, 2, 2)
    assert (layout.stage, layout.tensor_rank, layout.peers) == (1, 1, (2, 3))
    assert layout.is_last_stage
    assert not layout.is_first_stage


@pytest.mark.parametrize(("tensor", "pipeline", "chooser"), [(1, 1, 0), (4, 1, 0), (1, 3, 2), (2, 3, 4)])
def test_one_rank_leads_and_one_chooses(tensor: int, pipeline: int, chooser: int) -> None:
    """Rank 0 takes plans; the first rank of the last stage chooses tokens."""
    layouts = [RankLayout(rank, tensor, pipeline) for rank in range(tensor * pipeline)]
    assert [layout.rank for layout in layouts if layout.leads] == [0]
    assert [layout.rank for layout in layouts if layout.chooses] == [chooser]


def test_compiled_code_is_a_ranks_own() -> None:
    """The words that enter the key of compiled code differ between ranks and between splits."""
    layouts = [
        RankLayout(),
        RankLayout(0, 2),
        RankLayout(1, 2),
        RankLayout(0, 1, 2),
        RankLayout(0, 2, 1, True),
    ]
    assert len(set(map(str, layouts))) == len(layouts)
