"""Files and folders that other users may have changed are refused, and none is written through a link."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.errors import ConfigurationRefused
from protos.service import private_files
from tests.support.foreign import STRANGER, Foreign, foreign_folders


def test_a_new_folder_is_for_us_alone(tmp_path: Path) -> None:
    """So are the parents made with it, whatever the umask is."""
    before = os.umask(0)
    try:
        private_files.make_folder(tmp_path / "a" / "b", "the cache", "move it")
        private_files.write_text(tmp_path / "a" / "b" / "file", "text")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/file")] == [
        0o700, 0o700, 0o644,
    ]  # fmt: skip
    private_files.make_folder(tmp_path / "a" / "b", "the cache", "move it")


@foreign_folders
def test_what_others_may_have_changed_is_refused(foreign: Foreign, tmp_path: Path) -> None:
    """The line names the path, its owner and mode, and what to do."""
    folder, file = tmp_path / "folder", tmp_path / "secret"
    folder.mkdir(0o755)
    file.write_text("s")
    file.chmod(0o644)
    assert private_files.read_secret(file, "--key-file") == b"s"
    words = foreign(folder)
    with pytest.raises(ConfigurationRefused, match=f"^the cache {folder} belongs to {words}.*move it$"):
        private_files.make_folder(folder, "the cache", "move it")
    file.chmod(0o666)
    with pytest.raises(ConfigurationRefused, match=rf"^--key-file: {file} belongs to .*0666.*mode$"):
        private_files.read_secret(file, "--key-file")


_CHECKS = """
import os, sys
from pathlib import Path
import protos.errors  # the user may not be able to read it
from protos.service import private_files
if uid := int(sys.argv[1]):
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
private_files.check(Path(sys.argv[2]), "the cache", "move it")
"""


def _check_as(uid: int, folder: Path, *within: str) -> str:
    """Returns the last line of a process of that user that checks a folder, empty if it is accepted."""
    command = [*within, sys.executable, "-c", _CHECKS, str(uid), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return "".join(done.stderr.splitlines()[-1:])


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that other users can reach, which pytest's are not."""
    if os.geteuid():
        pytest.skip("only root can be other users")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_volumes_of_kubernetes_are_used(open_path: Path) -> None:
    """Those of an fsGroup with the user's number, which no list knows, and those that live with the pod."""
    volume = open_path / "volume"
    volume.mkdir()
    for gid, mode, refused in ((STRANGER, 0o2775, False), (STRANGER + 1, 0o2775, True), (0, 0o777, True)):
        os.chown(volume, 0, gid)
        volume.chmod(mode)
        line = _check_as(STRANGER, volume)
        assert (f"with mode {mode:04o} (gid {gid}): only uid {STRANGER} or root" in line) is refused, line
        assert bool(line) is refused
    empty_dir = open_path / "kubernetes.io~empty-dir" / "volume"
    empty_dir.mkdir(parents=True)
    empty_dir.chmod(0o777)
    other = open_path / "other"
    other.mkdir()
    other.chmod(0o777)
    mounted = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"')
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounts are not allowed here")
    assert not _check_as(STRANGER, volume, *mounted, str(empty_dir), str(volume))
    assert "with mode 0777" in _check_as(STRANGER, volume, *mounted, str(other), str(volume))


def test_files_of_the_hosts_root_are_used_in_user_namespaces(open_path: Path) -> None:
    """There they are those of the overflow user, who is a user like others outside of a namespace."""
    nobody = int(Path("/proc/sys/kernel/overflowuid").read_text())
    namespace = ("unshare", "--user", "--map-root-user")
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("user namespaces are not allowed here")
    for owner in (STRANGER, nobody):
        os.chown(open_path, owner, owner)
        assert f"uid {owner}" in _check_as(0, open_path)
        assert not _check_as(0, open_path, *namespace)
    open_path.chmod(0o775)
    assert "with mode 0775" in _check_as(0, open_path, *namespace)


def test_a_link_is_no_way_in(tmp_path: Path) -> None:
    """Nothing is written through one. A secret may be one, and a stranger's, as containers mount it."""
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("precious")
    link.symlink_to(victim)
    for mode in ("wb", "ab", "a+b"):
        with pytest.raises(OSError, match="symbolic link"):
            private_files.open_binary(link, mode)
    with pytest.raises(OSError, match="symbolic link"):
        private_files.write_text(link, "x")
    assert victim.read_text() == "precious"
    assert private_files.read_secret(link, "--key-file") == b"precious"
    if os.geteuid() == 0:
        os.chown(link, STRANGER, STRANGER)
        victim.chmod(0o664)
        assert private_files.read_secret(link, "--key-file") == b"precious"


def test_a_missing_secret_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationRefused, match=r"^--key-file: cannot read .*/none: No such file"):
        private_files.read_secret(tmp_path / "none", "--key-file")
