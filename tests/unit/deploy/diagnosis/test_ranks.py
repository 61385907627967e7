"""What `triptych doctor` finds about a replica of several ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deploy.commands.doctor import DoctorSettings
from deploy.diagnosis import ranks
from deploy.diagnosis.findings import Missing, Remark
from protos.settings import load

SPLIT = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2")


def settings(*flags: str) -> Any:
    return load(DoctorSettings, [*SPLIT, *flags])


def test_sizes_alone_are_enough_to_check() -> None:
    """The doctor joins no rank, but says what a worker needs besides."""
    with pytest.raises(Remark, match="rank 1 of 2 x 2; `triptych worker` needs --master and --replica-id"):
        ranks.layout(settings("--rank", "1"))
    found = ranks.layout(settings("--rank", "1", "--master", "h:1", "--replica-id", "r0"))
    assert found == "rank 1 of 2 x 2, in replica r0"


def test_the_meeting_place_must_have_an_address() -> None:
    """Addresses need no lookup; an unknown name fails."""
    assert ranks.master("127.0.0.1:29500") == "127.0.0.1:29500 is 127.0.0.1"
    assert ranks.master("[::1]:29500") == "[::1]:29500 is ::1"
    with pytest.raises(Missing, match=r"--master host\.invalid:1: this machine does not know the host"):
        ranks.master("host.invalid:1")


@pytest.mark.parametrize("count", [1, 3])
def test_too_few_gpus_are_a_note(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks may be on several hosts, which one host cannot know."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(Remark, match=rf"^{count} GPUs? visible, and the replica takes 4: start the other"):
        ranks.devices(settings(), "cuda")


def test_enough_devices_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs are always enough."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert ranks.devices(settings(), "cuda") == "4 GPUs visible, and the replica takes 4"
    assert ranks.devices(settings(), "cpu") == "4 ranks of one host share its cores"
    assert ranks.devices(settings("--rbln-backend", "rbln-check"), "rbln").startswith("4 ranks of one host")


def test_npus_that_work_together_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable lists NPUs; torch counts those that work together as one."""
    both = settings("--rbln-num-devices-per-local-rank", "2")
    monkeypatch.setenv("RBLN_DEVICES", "0,1,2")
    with pytest.raises(Remark, match="3 NPUs visible, and the replica takes 8"):
        ranks.devices(both, "rbln")
    monkeypatch.delenv("RBLN_DEVICES")
    monkeypatch.setattr(torch, "rbln", SimpleNamespace(device_count=lambda: 4), raising=False)
    assert ranks.devices(both, "rbln") == "8 NPUs visible, and the replica takes 8"
