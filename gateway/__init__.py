"""The gateway: OpenAI's HTTP interface over the scheduler's gRPC.

It turns text into token ids and back, and needs neither torch nor model weights. pyproject.toml lists the
layers of its rooms.
"""

from importlib import metadata
from typing import Final

try:
    VERSION: Final = metadata.version("triptych")
except metadata.PackageNotFoundError:
    VERSION: Final = "0+unknown"  # type: ignore[misc]
