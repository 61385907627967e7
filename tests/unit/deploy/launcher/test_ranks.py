"""The launcher's replicas of several ranks."""

import pytest

from deploy.commands.up import worker_names
from deploy.launcher.service_flags import worker_environment, worker_flags
from deploy.launcher.settings import LaunchSettings
from protos.errors import ConfigurationRefused
from protos.settings import load
from worker_svc.settings import Settings as WorkerSettings

SPLIT = ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"]


def test_each_rank_of_each_replica_is_a_worker() -> None:
    """Ranks of a replica share its name and its meeting place, and each has a device of its own."""
    settings = load(LaunchSettings, [*SPLIT, "--workers", "2", "--device", "cuda"])
    flags = [
        worker_flags(settings, 50061 + index, index=index, master=29500 + index // 4) for index in range(8)
    ]
    workers = [load(WorkerSettings, each) for each in flags]
    assert [worker.layout.rank for worker in workers] == [0, 1, 2, 3] * 2
    assert [worker.replica_id for worker in workers] == ["replica-0"] * 4 + ["replica-1"] * 4
    assert [worker.master for worker in workers] == ["127.0.0.1:29500"] * 4 + ["127.0.0.1:29501"] * 4
    assert [worker.local_rank for worker in workers] == list(range(8))
    assert worker_environment(settings, 3) == {}
    assert worker_names(settings)[3:5] == ["worker-0-rank-3", "worker-1-rank-0"]


def test_one_rank_needs_no_meeting_place() -> None:
    """A replica of one rank is started as ever."""
    settings = load(LaunchSettings, ["--workers", "2"])
    assert not any(
        flag.startswith(("--rank", "--master", "--replica-id")) for flag in worker_flags(settings, 1)
    )
    assert worker_names(settings) == ["worker-0", "worker-1"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (SPLIT, "needs --master host:port"),
        ([*SPLIT, "--master", "a:1", "--replica-id", "r", "--rank", "4"], "--rank 4 does not exist"),
        ([*SPLIT, "--master", "a:1", "--replica-id", "r", "--world-size", "3"], "--world-size 3 is not"),
    ],
)
def test_a_worker_of_ones_own_says_what_is_missing(flags: list[str], reason: str) -> None:
    """Ranks that nothing has numbered are refused with the flag to set."""
    with pytest.raises(ConfigurationRefused, match=reason):
        load(WorkerSettings, ["--model", "any", *flags])
