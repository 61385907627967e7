"""Folders and files that other users may have changed, in the ways that there are."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

Foreign: TypeAlias = Callable[[Path], str]
"""Makes a path foreign; returns an expression for the words of a refusal after "belongs to"."""

STRANGER = 4321


def _of_another_user(path: Path) -> str:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(path, STRANGER, 0)
    return rf"uid {STRANGER} with mode 0[67]"


def _open_to_all(path: Path) -> str:
    path.chmod(path.stat().st_mode | 0o002)
    return r".*uid \d+\)? with mode 0[67].[2367]"


def _open_to_a_group(path: Path) -> str:
    if os.geteuid():
        pytest.skip("only root can give files to any group")
    os.chown(path, -1, STRANGER)
    path.chmod(path.stat().st_mode | 0o020)
    return r".*uid \d+\)? with mode 0[67][2367]."


foreign_folders = pytest.mark.parametrize("foreign", [_of_another_user, _open_to_all, _open_to_a_group])
"""Runs a test for each way, with the argument `foreign`."""
