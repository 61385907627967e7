"""Records which first-party files run between SIGUSR1 and SIGUSR2.

Python imports this module in every process that has its folder on PYTHONPATH.
The second signal writes the files to ``$TRIPTYCH_WALK/<process id>``, one a line.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

_ROOT = str(Path(__file__).resolve().parents[4]) + os.sep
_active = False
_seen: set[str] = set()


def _profile(frame: FrameType, event: str, argument: Any) -> None:
    # Threads have this function from their start; before the first signal it only reads a flag.
    if _active and event == "call" and frame.f_code.co_name != "<module>":
        _seen.add(frame.f_code.co_filename)


def _start(signum: int, frame: FrameType | None) -> None:
    global _active  # noqa: PLW0603 - the one switch of this process
    _seen.clear()
    _active = True
    sys.setprofile(_profile)


def _stop(signum: int, frame: FrameType | None) -> None:
    global _active  # noqa: PLW0603 - the one switch of this process
    _active = False
    sys.setprofile(None)
    files = sorted(file.removeprefix(_ROOT) for file in _seen if file.startswith(_ROOT))
    target = Path(os.environ["TRIPTYCH_WALK"]) / str(os.getpid())
    part = target.with_suffix(".part")
    part.write_text("".join(f"{file}\n" for file in files))
    part.rename(target)


if "TRIPTYCH_WALK" in os.environ:
    threading.setprofile(_profile)
    signal.signal(signal.SIGUSR1, _start)
    signal.signal(signal.SIGUSR2, _stop)
