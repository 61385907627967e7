"""The table of vLLM's flags: it is complete, true of vLLM, and true of our settings."""

import subprocess
import sys

import pytest

from deploy.launcher.settings import LaunchSettings
from deploy.vllm_flags.compilation import VLLM_KEYS
from deploy.vllm_flags.older import OLDER
from deploy.vllm_flags.parsers import REASONING_PARSERS, TOOL_PARSERS
from deploy.vllm_flags.rbln import RBLN
from deploy.vllm_flags.table import FLAGS
from protos.settings import fixed_fields

# Prints the names and the form of each flag of vLLM's own parser.
_PROGRAM = """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for action in make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))._actions:
    names = [name for name in action.option_strings if not name.startswith("--no-")]
    if action.option_strings and "--help" not in names:
        form = "values" if action.nargs == "+" else "switch" if action.nargs == 0 else "value"
        print("FLAG", form, *sorted(names))
import dataclasses
from vllm.config import CompilationConfig
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
print("TOOLS", *ToolParserManager.list_registered())
print("REASONING", *ReasoningParserManager.list_registered())
print("KEYS", *(field.name for field in dataclasses.fields(CompilationConfig) if field.init))
"""


@pytest.mark.slow
def test_the_table_has_every_flag_of_vllm_with_its_names_and_form() -> None:
    """A flag that vLLM adds, renames or removes shows up as a difference."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    printed = {word: [rest for first, _, rest in lines if first == word] for word, _, _ in lines}
    theirs = set(printed["FLAG"])
    ours = {" ".join([flag.form, *sorted((flag.name, *flag.short))]) for flag in FLAGS}
    assert ours == theirs
    for word, names in (
        ("KEYS", {*VLLM_KEYS, "mode", "compile_sizes"}), ("TOOLS", TOOL_PARSERS), ("REASONING", REASONING_PARSERS),
    ):  # fmt: skip
        assert names == set(printed[word][0].split())


def test_no_flag_is_listed_twice() -> None:
    """Each name belongs to one row."""
    names = [name for flag in (*FLAGS, *RBLN, *OLDER) for name in (flag.name, *flag.short)]
    assert len(names) == len(set(names))


def test_the_flags_that_the_table_names_exist() -> None:
    """An alias or a mapped flag leads to a flag of the settings of `triptych up`."""
    fixed = fixed_fields(LaunchSettings)
    settings = {f"--{name.replace('_', '-')}" for name in LaunchSettings.model_fields if name not in fixed}
    missing = [
        flag.name
        for flag in (*FLAGS, *RBLN, *OLDER)
        if flag.ours and flag.ours not in {*settings, "--config"}
    ]
    assert missing == []
    # A setting of ours with a name of vLLM's is no flag without effect.
    assert [flag.name for flag in FLAGS if flag.name in settings and not flag.ours] == []


def test_rows_say_what_their_kind_needs() -> None:
    """Mapped flags have a conversion, refused and moot ones a reason; reasons read on after the name."""
    for flag in (*FLAGS, *RBLN, *OLDER):
        assert (flag.kind == "mapped") == (flag.convert is not None), flag.name
        assert bool(flag.ours) == (flag.kind in {"alias", "mapped"}), flag.name
        assert flag.reason or flag.kind == "alias", flag.name
        assert not flag.reason.endswith("."), flag.name
        assert (
            flag.reason[:1].islower() or flag.reason.startswith(("/", "-", "`", "KV", "/")) or not flag.reason
        )
