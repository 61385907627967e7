"""`triptych completion`: scripts of real shells, made from the parsers of all commands."""

import shutil
import subprocess
from pathlib import Path

import pytest

from deploy import cli

# Prints the words that bash would offer for the last word of each line.
_OFFER = """
source "$1"
function=$(complete -p triptych | sed 's/.*-F \\([^ ]*\\).*/\\1/')
while read -r -a COMP_WORDS; do
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    "$function" triptych "${COMP_WORDS[COMP_CWORD]}"
    echo "${COMPREPLY[*]}"
done
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def test_bash_completes_commands_flags_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "triptych.bash"
    file.write_text(script("bash", capsys))
    offered = {
        "triptych sch": "scheduler",
        "triptych up --max-num-s": "--max-num-seqs",
        "triptych serve --device c": "cpu cuda",
        "triptych keep-worker --standby": "--standby-workers",
        "triptych catalog li": "list",
        "triptych catalog list --j": "--json",
        "triptych models fetch sm": "smollm2",
        "triptych completion f": "fish",
        "triptych doctor --par": "--parity",
    }
    done = subprocess.run(
        ["bash", "-c", _OFFER, "bash", str(file)],
        input="\n".join(offered) + "\n", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert dict(zip(offered, done.stdout.splitlines(), strict=True)) == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_the_same_words(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script(shell, capsys)
    for word in ("keep-worker", "max-num-seqs", "rbln", "standby-workers", "smollm2", "parity"):
        assert word in text
    file = tmp_path / shell
    file.write_text(text)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: its script has the words, and nothing has read it")
    subprocess.run([shell, "-n", str(file)], check=True)
