"""`triptych compose-files` and `triptych secure-files`: the files of a deployment, written to a folder."""

import shutil
import sys
from importlib.metadata import Distribution, PackagePath, distribution
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import deploy
from protos.service.help import ArgumentParser

# pip writes these into an installation; they are not part of the wheel.
_WRITTEN_BY_PIP = {"INSTALLER", "RECORD", "REQUESTED", "direct_url.json"}
_SECURE_SETTINGS = """\
Services, as variables:
  TRIPTYCH_GRPC_TLS_CA={files.ca}
  TRIPTYCH_GRPC_TLS_CERT={files.service_cert}
  TRIPTYCH_GRPC_TLS_KEY={files.service_key}
  TRIPTYCH_GRPC_TLS_NAME={name}
  TRIPTYCH_GRPC_TLS_REQUIRE_CLIENT_CERT=1
  TRIPTYCH_SERVICE_TOKEN_FILE={files.service_token}
Gateways, too:
  TRIPTYCH_SSL_CERTFILE={files.http_cert}
  TRIPTYCH_SSL_KEYFILE={files.http_key}
  TRIPTYCH_API_KEY_FILE={files.api_keys}
HTTP clients:
  curl --cacert {files.ca} -H "Authorization: Bearer $(cat {files.api_key})" https://HOST:8000/v1/models\
"""


def compose(argv: list[str]) -> int:
    """Writes compose files, Dockerfiles, locks and the installed package as a wheel."""
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


def secure(argv: list[str]) -> int:
    """Makes certificates, a token and a key where they are missing, and prints their settings.

    Returns:
        0; 1 if the folder cannot be written, 2 for a bad host.
    """
    # Imported here: compose files are written before any service's packages are installed.
    from deploy import secure_files
    from protos.errors import ConfigurationRefused

    parser = ArgumentParser(
        prog="triptych secure-files",
        description="Makes certificates, a service token and an API key that protect a deployment."
        " Files that are there stay, certificates until 30 days before they expire.",
    )
    parser.add_argument("folder", type=Path, help="the folder; only its owner can read the files")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name or address at which HTTP clients find the gateways; may be repeated",
    )
    arguments = parser.parse_args(argv)
    try:
        files = secure_files.make(arguments.folder.absolute(), arguments.host)
    except ConfigurationRefused as error:
        print(f"triptych secure-files: {error.message}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"triptych secure-files: cannot write {arguments.folder}: {error.strerror}", file=sys.stderr)
        return 1
    print(_SECURE_SETTINGS.format(files=files, name=secure_files.SERVICE_NAME))
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
