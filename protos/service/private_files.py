"""Files and folders made and changed only by this user or root.

The owner of a folder, and everyone with write access, controls the files loaded from it and overwritten
there. So folders are checked before use, files of secrets on each reading, and no file is written through a
link. A secret named by a setting may belong to anybody: a container's user rarely owns mounted files.
"""

import contextlib
import errno
import grp
import os
import pwd
import stat
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

if TYPE_CHECKING:
    from protos.errors import ConfigurationRefused


def check(path: Path, what: str, remedy: str) -> None:
    """Refuses a path open to changes by others. For a link, both owners count, and its target's mode.

    Args:
        path: an existing file or folder.
        what: its name in the refusal, such as "the run dir".
        remedy: the advice, such as "choose another --run-dir".

    Raises:
        ConfigurationRefused: names path, owner and mode.
        OSError: it cannot be looked at.
    """
    reason = _fault_of(path.lstat(), path.stat())
    if reason and not _is_of_our_pod(path):
        raise _foreign(f"{what} {path}", reason, remedy)


def make_folder(path: Path, what: str, remedy: str, *, mode: int = 0o700) -> None:
    """Makes a folder with its parents, closed to others; checks an existing folder with `check`."""
    for each in (*reversed(path.parents), path):
        if not each.is_dir():
            each.mkdir(mode=mode, exist_ok=True)
    check(path, what, remedy)


def open_binary(path: Path, mode: str, *, buffering: int = -1) -> IO[bytes]:
    """Opens a file as `Path.open` does, but never through a link; a new file is writable only by us."""
    return cast("IO[bytes]", open(path, mode, buffering, opener=_open))


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{Path(path).name} is a symbolic link", path) from None
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a file as `Path.write_text` does, but never through a link."""
    with open_binary(path, "wb") as file:
        file.write(text.encode())


def read_secret(path: Path, flag: str, most_bytes: int = -1) -> bytes:
    """Returns the content of a file on which the security of a service rests.

    Args:
        path: may be a link, as in mounts of secrets into containers.
        flag: names the setting in refusals.
        most_bytes: stops reading after these; negative: reads all.

    Raises:
        ConfigurationRefused: it cannot be read, or is open to changes by others.
    """
    try:
        with path.open("rb") as file:
            reason = _fault_of(os.fstat(file.fileno()), any_owner=True)
            content = file.read(most_bytes)
    except OSError as error:
        raise _refusal(f"{flag}: cannot read {path}: {error.strerror}") from error
    if reason:
        raise _foreign(f"{flag}: {path}", reason, "change its mode")
    return content


def _refusal(message: str) -> "ConfigurationRefused":
    from protos.errors import ConfigurationRefused  # needs gRPC, which a bare wheel's commands do without

    return ConfigurationRefused(message)


def _foreign(name: str, reason: str, remedy: str) -> "ConfigurationRefused":
    owners = f"{_user(os.geteuid())} or root" if os.geteuid() else "root"
    return _refusal(f"{name} {reason}: only {owners} may own it and write to it; {remedy}")


def _fault_of(*found: os.stat_result, any_owner: bool = False) -> str | None:
    foreign = [each.st_uid for each in found if not (any_owner or _is_trusted(each.st_uid))]
    target = found[-1]
    # A stranger's private group is in no list of this machine or container, but it has its user's number.
    is_private = _is_private_group(target.st_gid) or (any_owner and target.st_gid == target.st_uid)
    written_by_others = target.st_mode & stat.S_IWOTH or (target.st_mode & stat.S_IWGRP and not is_private)
    if not foreign and not written_by_others:
        return None
    owner = _user(foreign[0] if foreign else target.st_uid)
    return f"belongs to {owner} with mode {stat.S_IMODE(target.st_mode):04o} (gid {target.st_gid})"


def _is_trusted(uid: int) -> bool:
    """Whether this is root, or we, or in a user namespace an unmapped user, such as the host's root."""
    if uid in (0, os.geteuid()):
        return True
    has_all = Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
    return not has_all and uid == int(Path("/proc/sys/kernel/overflowuid").read_text())


def _is_private_group(gid: int) -> bool:
    """Whether a group is root's, or this user's only: many systems let such a group write by default.

    The group of a container's user, such as a pod's fsGroup, may be in no list: then the number decides.
    """
    if gid == 0:
        return True
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return gid == os.geteuid()
    with contextlib.suppress(KeyError):
        return {group.gr_name, *group.gr_mem} == {pwd.getpwuid(os.geteuid()).pw_name}
    return False


def _is_of_our_pod(path: Path) -> bool:
    """Whether an emptyDir is mounted here: Kubernetes opens it to all, but in the pod's containers only."""
    mounts = map(str.split, Path("/proc/self/mountinfo").read_text().splitlines())
    at = str(path.resolve())
    return any(each[4] == at and "/kubernetes.io~empty-dir/" in each[3] for each in mounts)


def _user(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    return f"uid {uid}"
