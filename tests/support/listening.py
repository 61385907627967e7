"""The TCP ports on which processes of this machine listen."""

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

_LISTEN = "0A"


def tcp_ports(pids: Iterable[int]) -> set[int]:
    """Returns the ports on which these processes listen, on any address."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.update(re.findall(r"socket:\[(\d+)\]", str(link.readlink())))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTEN and row[9] in inodes}
