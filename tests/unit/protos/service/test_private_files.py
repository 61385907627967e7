"""Files and folders that other users may have changed are refused, and none is written through a link."""

import os
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
    """The refusal has the flag and the system's words."""
    with pytest.raises(ConfigurationRefused, match=r"^--key-file: cannot read .*/none: No such file"):
        private_files.read_secret(tmp_path / "none", "--key-file")
