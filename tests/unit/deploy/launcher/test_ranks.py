"""The launcher's replicas of several ranks."""

from pathlib import Path

import pytest

from deploy.commands.up import num_standbys
from deploy.launcher.service_flags import worker_environment, worker_flags
from deploy.launcher.settings import LaunchSettings
from deploy.launcher.stack_plan import StackPlan
from protos.errors import ConfigurationRefused
from protos.service.settings import load
from worker_svc.settings import Settings as WorkerSettings

TOGETHER = ["--master", "a:1", "--replica-id", "r"]
SPLIT = ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"]


def test_each_rank_of_each_replica_is_a_worker() -> None:
    """Ranks of a replica share its name and its meeting place, and each has a device of its own."""
    settings = load(LaunchSettings, [*SPLIT, "--workers", "2", "--device", "cuda"])
    flags = [worker_flags(settings, index=index, master=29500 + index // 4) for index in range(8)]
    workers = [load(WorkerSettings, each) for each in flags]
    assert [worker.layout.rank for worker in workers] == [0, 1, 2, 3] * 2
    assert [worker.replica_id for worker in workers] == ["replica-0"] * 4 + ["replica-1"] * 4
    assert [worker.master for worker in workers] == ["127.0.0.1:29500"] * 4 + ["127.0.0.1:29501"] * 4
    assert [worker.local_rank for worker in workers] == list(range(8))
    assert worker_environment(settings, 3) == {}
    assert num_standbys(settings) == 4


def test_workers_are_named_by_replica_and_rank(tmp_path: Path) -> None:
    for flags, names in (
        ([*SPLIT, "--workers", "2"], ["worker-0-rank-3", "worker-1-rank-0"]),
        (["--workers", "5"], ["worker-3", "worker-4"]),
    ):
        settings = load(LaunchSettings, [*flags, "--port=0"])
        assert [spec.name for spec in StackPlan.make(settings, tmp_path).workers[3:5]] == names


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (SPLIT, "needs --master host:port"),
        ([*SPLIT, *TOGETHER, "--rank", "4"], "--rank 4 does not exist in a replica of 4; ranks are 0 to 3"),
        ([*SPLIT, *TOGETHER, "--world-size", "3"], "--world-size 3 is not .* set --tensor-parallel-size or"),
        (["--world-size", "2"], "--world-size 2 is not .* set --tensor-parallel-size or --pipeline-parallel"),
        (["--rank", "1"], "replica of 1; set --tensor-parallel-size or --pipeline-parallel-size"),
        (["--enable-expert-parallel"], "there is one; raise --tensor-parallel-size"),
        (["--master", "h"], r"--master .* should be host:port with a port from 1 to 65535, got 'h'"),
        (["--master", "h:0"], "--master .* should be host:port"),
        (["--master", "h:99999"], "--master .* should be host:port"),
        (["--master", ":29500"], "--master .* should be host:port"),
    ],
)
def test_a_worker_of_ones_own_says_what_is_missing(flags: list[str], reason: str) -> None:
    """Ranks that nothing has numbered are refused with the flag to set."""
    with pytest.raises(ConfigurationRefused, match=reason):
        load(WorkerSettings, ["--model", "any", *flags])


@pytest.mark.parametrize("master", ["[::1]:1", "host-a:65535", "10.0.0.1:29500"])
def test_a_meeting_place_has_a_host_and_a_port(master: str) -> None:
    settings = load(WorkerSettings, ["--model", "any", "--master", master])
    assert settings.master == master


@pytest.mark.parametrize("name", ["RBLN_PROFILER", "VLLM_RBLN_PROFILER"])
def test_the_vendors_profiler_is_refused_with_several_ranks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It works in one process; 0 and an empty variable turn it off."""
    flags = ["--model", "any", *SPLIT, *TOGETHER]
    for off in ("", "0", "False"):
        monkeypatch.setenv(name, off)
        load(WorkerSettings, flags)
    monkeypatch.setenv(name, "1")
    load(WorkerSettings, ["--model", "any"])
    with pytest.raises(ConfigurationRefused, match=f"^{name} works in one process, .* has 4; unset it"):
        load(WorkerSettings, flags)


def test_layers_of_stages_cannot_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of vLLM is refused with stages, and does not matter without them."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,1")
    load(WorkerSettings, ["--model", "any", "--tensor-parallel-size", "2", *TOGETHER])
    with pytest.raises(ConfigurationRefused, match="VLLM_PP_LAYER_PARTITION is not supported; unset"):
        load(WorkerSettings, ["--model", "any", *SPLIT, *TOGETHER])
