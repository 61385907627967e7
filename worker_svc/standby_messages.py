"""The message that turns a standby into a worker. Launchers import it, so it imports almost nothing."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Orders:
    """A standby's instructions to become a worker."""

    flags: tuple[str, ...]
    """The worker's flags."""
    environment: Mapping[str, str]
    """Variables to add before anything opens a device."""
    log: str | None
    """File of standard output and error from now on; `None` for no change."""

    def to_line(self) -> bytes:
        """Returns a line of JSON for `from_line`."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "Orders":
        """Reads a line made by `to_line`."""
        fields = json.loads(line)
        return cls(tuple(fields["flags"]), fields["environment"], fields["log"])
