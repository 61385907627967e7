"""`triptych compose-files`: writes what `docker compose` needs to a folder, where there is no checkout."""

import shutil
import sys
from importlib.metadata import Distribution, PackagePath, distribution
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import deploy
from deploy.argument_parser import ArgumentParser

# pip writes these into an installation; they are not part of the wheel.
_WRITTEN_BY_PIP = {"INSTALLER", "RECORD", "REQUESTED", "direct_url.json"}


def main(argv: list[str]) -> int:
    """Writes compose files, Dockerfiles, locks and the installed package as a wheel.

    Returns:
        The exit code: 0; 1 if the folder cannot be written or a checkout is installed.
    """
    parser = ArgumentParser(
        prog="triptych compose-files",
        description="Writes the compose files, and all that building their images needs, to a folder.",
    )
    parser.add_argument("folder", type=Path, help="a new or an empty folder")
    folder: Path = parser.parse_args(argv).folder
    source = Path(deploy.__path__[0])
    if (source.parent / "pyproject.toml").exists():
        print(f"triptych compose-files: a checkout has them already, in {source}", file=sys.stderr)
        return 1
    try:
        if folder.exists() and any(folder.iterdir()):
            print(f"triptych compose-files: {folder} is not empty", file=sys.stderr)
            return 1
        for part in ("images", "locks"):
            shutil.copytree(source / part, folder / "deploy" / part)
        for path in source.glob("compose*.yaml"):
            shutil.copy(path, folder / "deploy")
        write_wheel(distribution("triptych"), folder)
    except OSError as error:
        print(f"triptych compose-files: cannot write {folder}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"docker compose -f {folder / 'deploy' / 'compose.yaml'} up --build --wait")
    return 0


def write_wheel(installed: Distribution, folder: Path) -> Path:
    """Writes an installed pure Python distribution as a wheel again, and returns its path."""
    files = [file for file in installed.files or [] if _is_packaged(file)]
    metadata = next(file for file in files if file.name == "METADATA")
    record = str(metadata.with_name("RECORD"))
    packaged = {str(file) for file in files}
    lines = (installed.read_text("RECORD") or "").splitlines()
    path = folder / f"{installed.name}-{installed.version}-py3-none-any.whl"
    with ZipFile(path, "w", ZIP_DEFLATED) as wheel:
        for file in files:
            wheel.writestr(str(file), file.read_binary())
        kept = [line for line in lines if line.partition(",")[0] in packaged]
        wheel.writestr(record, "\n".join([*kept, f"{record},,", ""]))
    return path


def _is_packaged(file: PackagePath) -> bool:
    """Returns whether a file was in the wheel, rather than made by its installation."""
    return file.parts[0] != ".." and file.suffix != ".pyc" and file.name not in _WRITTEN_BY_PIP
