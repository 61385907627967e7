"""The ports of a stack."""

import socket

import pytest

from deploy.launcher.settings import LaunchSettings
from deploy.launcher.stack_plan import free_ports
from deploy.launcher.supervisor import LaunchError
from protos.service.settings import load


def settings(*flags: str) -> LaunchSettings:
    return load(LaunchSettings, ["--port", "0", "--scheduler-port", "0", *flags])


def test_ports_are_all_different() -> None:
    """The gateways share a port and have one each; the scheduler and every worker have one."""
    with free_ports(settings("--workers", "4", "--gateways", "3")) as ports:
        assert len({ports.http, ports.scheduler, *ports.workers, *ports.metrics}) == 2 + 4 + 3


def test_one_gateway_needs_no_second_port() -> None:
    """It has one if it was given one."""
    with free_ports(settings()) as ports:
        assert ports.metrics == (None,)
        free = ports.http
    with free_ports(settings("--metrics-port", str(free))) as ports:
        assert ports.metrics == (free,)


def test_gateways_have_consecutive_metrics_ports() -> None:
    """A taken one is refused with the flag to change."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ("--gateways", "2", "--metrics-port", str(port - 1))
        refusal = f"port {port}: .*choose another with --metrics-port"
        with pytest.raises(LaunchError, match=refusal), free_ports(settings(*flags)):
            pass
    with free_ports(settings(*flags)) as ports:
        assert ports.metrics == (port - 1, port)
