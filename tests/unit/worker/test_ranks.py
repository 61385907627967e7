"""Ranks: layout, agreement, and hidden states over their devices' backend, or the host for a shared GPU."""

from typing import Any

import pytest
import torch
from torch import distributed

from protos.errors import ConfigurationRefused
from worker_svc.ranks.group import Links, _refuse_shared_devices, refuse_differences
from worker_svc.ranks.layout import RankLayout


def test_ranks_are_numbered_stage_by_stage() -> None:
    layout = RankLayout(3, 2, 2)
    assert (layout.stage, layout.tensor_rank, layout.peers) == (1, 1, (2, 3))
    assert layout.is_last_stage
    assert not layout.is_first_stage


@pytest.mark.parametrize(("tensor", "pipeline", "chooser"), [(1, 1, 0), (4, 1, 0), (1, 3, 2), (2, 3, 4)])
def test_one_rank_leads_and_one_chooses(tensor: int, pipeline: int, chooser: int) -> None:
    layouts = [RankLayout(rank, tensor, pipeline) for rank in range(tensor * pipeline)]
    assert [layout.rank for layout in layouts if layout.leads] == [0]
    assert [layout.rank for layout in layouts if layout.chooses] == [chooser]


def test_equal_facts_are_accepted() -> None:
    refuse_differences([{"dtype": "bfloat16"}] * 3)
    refuse_differences([{}, {}])


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ([{"-O": "1"}, {"-O": "2"}], "rank 0 of the replica has -O 1 and rank 1 has 2;"),
        ([{"-O": "1"}, {"-O": "1"}, {"-O": "2"}, {"-O": "2"}],
         "ranks 0, 1 of the replica have -O 1 and ranks 2, 3 have 2;"),
        ([{"version of triton": "3"}, {}],
         "rank 0 of the replica has version of triton 3 and rank 1 has none;"),
        ([{"device": "H100"}, {"device": "H200"}], "rank 0 of the replica has device H100 and rank 1 has H200;"),
    ],
)  # fmt: skip
def test_a_difference_is_named(facts: list[dict[str, str]], text: str) -> None:
    with pytest.raises(ConfigurationRefused, match=text):
        refuse_differences(facts)


class Done:
    """A transfer that has ended."""

    def wait(self) -> None:
        """Returns at once."""


class Wire:
    """Takes the place of torch.distributed: what one rank sends is what the other receives."""

    def __init__(self) -> None:
        self.groups: list[tuple[tuple[int, ...], str]] = []
        self.sent: list[tuple[torch.Tensor, int, Any]] = []

    def group(self, ranks: Any, backend: str) -> Any:
        self.groups.append((tuple(ranks), backend))
        return self.groups[-1]

    def isend(self, tensor: torch.Tensor, target: int, *, group: Any) -> Done:
        self.sent.append((tensor, target, group))
        return Done()

    def recv(self, tensor: torch.Tensor, source: int, *, group: Any) -> None:
        sent, _, used = self.sent[-1]
        assert used == group
        assert source == group[0][0]
        tensor.copy_(sent)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    found = Wire()
    monkeypatch.setattr(distributed, "isend", found.isend)
    monkeypatch.setattr(distributed, "recv", found.recv)
    return found


def links(wire: Wire, layout: RankLayout, devices: list[str]) -> Links:
    return Links(layout, devices, "nccl", wire.group)


def test_each_rank_is_linked_with_its_place_in_the_next_stage(wire: Wire) -> None:
    """All ranks make the same groups in the same order; stages on one GPU meet on the host."""
    devices = ["a", "b", "a", "c", "d", "c"]
    for rank in range(6):
        links(wire, RankLayout(rank, 2, 3), devices)
        assert wire.groups == [((0, 2), "gloo"), ((1, 3), "nccl"), ((2, 4), "nccl"), ((3, 5), "gloo")]
        wire.groups.clear()


@pytest.mark.parametrize("devices", [["a", "a"], ["a", "b"], ["", ""]])
def test_states_arrive_whatever_overwrites_them_later(wire: Wire, devices: list[str]) -> None:
    """The sender keeps a copy until the transfer has ended."""
    first, second = (links(wire, RankLayout(rank, 1, 2), devices) for rank in range(2))
    states = torch.arange(6.0).view(1, 2, 3)
    first.send(states)
    expected = states.clone()
    states.zero_()
    assert torch.equal(second.receive(torch.zeros(1, 2, 3)), expected)


def test_ranks_of_a_stage_need_their_own_gpus() -> None:
    """NCCL cannot join a GPU with itself; stages of a pipeline may share one."""
    with pytest.raises(ConfigurationRefused, match="ranks 0 and 1 of the replica have the same GPU"):
        _refuse_shared_devices(RankLayout(1, 2, 1), ["a", "a"])
    _refuse_shared_devices(RankLayout(1, 1, 2), ["a", "a"])
    _refuse_shared_devices(RankLayout(0, 2, 2), ["a", "b", "a", "b"])
    _refuse_shared_devices(RankLayout(0, 2, 1), ["", ""])


def test_every_link_is_used_before_the_first_request(wire: Wire) -> None:
    """A rank in the middle hears from the stage before, then calls the one behind."""
    first, middle, last = (links(wire, RankLayout(rank, 1, 3), ["a", "b", "c"]) for rank in range(3))
    for each in (first, middle, last):
        each.connect(torch.device("cpu"))
    assert [target for _, target, _ in wire.sent] == [1, 2]
