"""One service as a process of its own, on a free port."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Service:
    """A started service."""

    process: "subprocess.Popen[str]"
    log: list[str] = field(default_factory=list)
    """The lines of its log that were read."""

    @property
    def line(self) -> dict[str, Any]:
        """The fields of the last line that was read."""
        found: dict[str, Any] = json.loads(self.log[-1])
        return found

    def read_until(self, event: str) -> None:
        """Reads the log until an event is in it."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if line.startswith("{") and self.line["event"] == event:
                return
        raise AssertionError(f"the service has ended without {event!r}: {self.log}")

    def end(self) -> str:
        """Ends the service; returns its whole log."""
        self.process.terminate()
        return "".join([*self.log, self.process.communicate(timeout=20)[1]])


@contextlib.contextmanager
def running_service(
    *command: str, event: str = "listening", environment: Mapping[str, str] = {}
) -> Iterator[Service]:
    """Runs Python with these arguments within the block, and waits for an event in its log."""
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | environment,
    ) as process:  # fmt: skip
        service = Service(process)
        try:
            service.read_until(event)
            yield service
        finally:
            process.kill()
