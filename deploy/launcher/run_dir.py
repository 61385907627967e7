"""Claims the launcher's folder for pid files and logs; a lock keeps a second launcher out."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.launcher.supervisor import BAD_SETTING, LaunchError


@contextmanager
def claim(run_dir: Path) -> Iterator[None]:
    """Creates and locks the run dir, and removes the logs and pid files of an earlier launcher.

    Raises:
        LaunchError: Another launcher uses the folder, or it cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / "launcher.pid").open("a+")
    except OSError as error:
        raise LaunchError(f"cannot write to the run dir {run_dir}: {error.strerror}", BAD_SETTING) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            other = lock.read().strip()
            raise LaunchError(
                f"the run dir {run_dir} is in use by another `triptych up` (pid {other}); choose another --run-dir",
                BAD_SETTING,
            ) from None
        for stale in (*run_dir.glob("*.log"), *run_dir.glob("*.pid")):
            if stale.name != "launcher.pid":
                stale.unlink()
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        try:
            yield
        finally:
            (run_dir / "launcher.pid").unlink(missing_ok=True)
