"""The message that turns a standby into a worker. Launchers import it, so it imports almost nothing."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Orders:
    """What a standby needs to know to become a worker."""

    flags: tuple[str, ...]
    """The worker's flags."""
    environment: Mapping[str, str]
    """Variables to add before anything opens a device."""
    log: str | None
    """File that receives standard output and error from now on; `None` for no change."""

    def to_line(self) -> bytes:
        """Returns the line of JSON that `from_line` reads."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "Orders":
        """Reads a line that `to_line` made."""
        fields = json.loads(line)
        return cls(tuple(fields["flags"]), fields["environment"], fields["log"])
