"""Free TCP ports for processes that must be told one."""

import contextlib
import random
import socket
from typing import Final

# Below the ports that the system gives to outgoing connections: nothing takes a port before its process
# listens, or while that process restarts.
_PORTS: Final = range(20_000, 32_000)
_HOSTS: Final = ("127.0.0.1", "127.0.0.2")


def free_ports(count: int) -> list[int]:
    """Returns ports that are free on every loopback address that tests use."""
    ports = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for host in _HOSTS:
                held.enter_context(socket.create_server((host, port)))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"fewer than {count} ports are free")


def free_port() -> int:
    """Returns one free port."""
    return free_ports(1)[0]
