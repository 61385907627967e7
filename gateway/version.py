"""The installed version of Triptych."""

from importlib import metadata
from typing import Final


def _version() -> str:
    try:
        return metadata.version("triptych")
    except metadata.PackageNotFoundError:
        return "0+unknown"


VERSION: Final = _version()
