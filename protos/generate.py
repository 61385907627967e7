"""Generates the Python stubs from the .proto files, or checks that the committed ones are current.

``python -m protos.generate`` writes them; ``--check`` compares only and names stale files.
"""

import argparse
import filecmp
import re
import sys
import tempfile
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACKAGE = Path("triptych") / "v1"

# The .proto files import each other by their path below protos/, as other languages expect. In Python, the
# package `protos` comes before that path.
_IMPORT = re.compile(r"^(from|import) triptych\b", re.MULTILINE)
_MODULE_REFERENCE = re.compile(r"(?<![\w.\"'/])triptych\.v1\.(\w+_pb2)")


def generate(target: Path) -> None:
    """Writes all stubs below ``target``, in the layout of ``protos/``."""
    from grpc_tools import protoc  # a development dependency: the services never import it

    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / PACKAGE).glob("*.proto"))]
    include = resources.files("grpc_tools") / "_proto"
    # The plugins are beside the interpreter, so a virtual environment need not be active.
    plugins = Path(sys.executable).parent
    arguments = [
        "protoc",
        f"-I{ROOT}",
        f"-I{include}",
        f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
        f"--python_out={target}",
        f"--mypy_out=quiet:{target}",
        f"--grpc_python_out={target}",
        f"--mypy_grpc_out=quiet:{target}",
        *files,
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed")
    # A file of messages alone has no calls to make stubs for.
    for stub in (target / PACKAGE).glob("*_pb2_grpc.py*"):
        if "def add_" not in stub.read_text():
            stub.unlink()
    for stub in [*(target / PACKAGE).glob("*.py"), *(target / PACKAGE).glob("*.pyi")]:
        text = _IMPORT.sub(r"\1 protos.triptych", stub.read_text())
        stub.write_text(_MODULE_REFERENCE.sub(r"protos.triptych.v1.\1", text))


def stale(fresh: Path) -> list[str]:
    """Returns the names of committed stubs that differ from the generated ones below ``fresh``."""
    pattern = "*_pb2*.py*"
    names = {path.name for folder in (ROOT, fresh) for path in (folder / PACKAGE).glob(pattern)}

    def same(name: str) -> bool:
        ours, theirs = ROOT / PACKAGE / name, fresh / PACKAGE / name
        return ours.exists() and theirs.exists() and filecmp.cmp(ours, theirs, shallow=False)

    return sorted(name for name in names if not same(name))


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m protos.generate", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="compare only; exit code 1 if a stub is out of date"
    )
    check = parser.parse_args(argv).check
    if not check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        drifted = stale(Path(folder))
    if drifted:
        print(f"stubs out of date: {', '.join(drifted)}; run `make protos`", file=sys.stderr)
    return 1 if drifted else 0


if __name__ == "__main__":
    sys.exit(main())
