"""The tables of flags and variables, against the other programs and our settings."""

import re

import pytest

from deploy.launcher.settings import LaunchSettings
from deploy.vllm_flags.translate import BY_NAME, FLAGS
from protos.service.environment import VARIABLES
from protos.service.settings import fixed_fields
from tests.support import peer_names
from tests.support.rbln.wheels import IndexUnreachable


@pytest.mark.slow
def test_the_lists_are_complete() -> None:
    """They have every name of the installed vLLM, and of the plugins if the package index answers."""
    try:
        texts = peer_names.lists()
    except IndexUnreachable:
        texts = peer_names.lists(only_installed=True)
    assert {path: path.read_text() for path in texts} == texts


def test_names_belong_to_one_flag() -> None:
    assert len(BY_NAME) == sum(1 + len(flag.short) for flag in FLAGS.values())


def test_translations_lead_to_settings() -> None:
    """A mapped or native flag sets a setting of `triptych up`; notes name flags that exist."""
    fixed = fixed_fields(LaunchSettings)
    ours = {f"--{name.replace('_', '-')}" for name in LaunchSettings.model_fields if name not in fixed}
    set_here = {flag.ours.partition("=")[0] for flag in FLAGS.values() if flag.kind in {"native", "mapped"}}
    assert set_here - ours == {"--config"}
    for note in (*(flag.note for flag in FLAGS.values()), *(row.note for row in VARIABLES.values())):
        assert {*re.findall(r"(?<![\w`-])--[a-z][a-z-]+", note)} <= {*ours, *FLAGS}, note
