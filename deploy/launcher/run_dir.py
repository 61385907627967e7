"""Claims the launcher's folder for pid files, logs and sockets; a lock keeps a second launcher out."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.launcher.deaths import BAD_SETTING
from deploy.launcher.supervisor import LaunchError
from protos.wire import MAX_SOCKET_PATH_BYTES

# As long as the longest name of a socket.
_LONGEST_NAME = "metrics/0123456789ab.sock"
_LOCK = "launcher.pid"


@contextmanager
def claim(run_dir: Path, *, clean: bool = True) -> Iterator[None]:
    """Creates and locks the run dir.

    Args:
        run_dir: the folder.
        clean: whether to remove the files that an earlier launcher left.

    Raises:
        LaunchError: Another launcher uses the folder, or it cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        # Unbuffered: what a full disk refuses must not be written again when the file is closed.
        lock = (run_dir / _LOCK).open("a+b", buffering=0)
    except OSError as error:
        raise _unwritable(run_dir, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            other = lock.read().decode().strip()
            raise LaunchError(
                f"the run dir {run_dir} is in use by another `triptych up` (pid {other}); choose another --run-dir",
                BAD_SETTING,
            ) from None
        for kind in ("log", "pid", "sock") if clean else ():
            for stale in run_dir.glob(f"*.{kind}"):
                if stale.name != _LOCK:
                    stale.unlink()
        try:
            try:
                lock.truncate(0)
                lock.write(f"{os.getpid()}\n".encode())
            except OSError as error:
                raise _unwritable(run_dir, error) from error
            yield
        finally:
            (run_dir / _LOCK).unlink(missing_ok=True)


def _unwritable(run_dir: Path, error: OSError) -> LaunchError:
    return LaunchError(f"cannot write to the run dir {run_dir}: {error.strerror}", BAD_SETTING)


@contextmanager
def socket_folder(run_dir: Path) -> Iterator[Path]:
    """Yields the absolute folder of the services' Unix sockets.

    That is the run dir or, where its path is too long for a socket, a new folder that is removed at the end.
    """
    folder = run_dir.absolute()
    if len(os.fsencode(folder / _LONGEST_NAME)) <= MAX_SOCKET_PATH_BYTES:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="triptych-") as short:
        yield Path(short)
