"""The load of a deployment."""

from scheduler_svc.dispatch.load import Load, ReplicaLoad


def test_only_ready_replicas_count_towards_the_mean_kv_usage() -> None:
    """Starting replicas are listed but hold neither requests nor blocks."""
    load = Load((ReplicaLoad("a", 3, 0.5), ReplicaLoad("b", 1, 0.25), ReplicaLoad("c", starting="weights")))
    assert (load.num_running, load.kv_usage) == (4, 0.375)


def test_without_replicas_the_load_is_zero() -> None:
    """No replica means no division by zero."""
    assert (Load().num_running, Load().kv_usage) == (0, 0.0)
