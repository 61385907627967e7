"""`triptych secure-files`: makes certificates, a service token and an API key in a folder."""

import sys
from pathlib import Path

from deploy import secure_files
from deploy.argument_parser import ArgumentParser
from protos.errors import ConfigurationRefused

_SETTINGS = """\
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


def main(argv: list[str]) -> int:
    """Makes what the folder lacks, and says which settings use it.

    Returns:
        The exit code: 0; 1 if the folder cannot be written, 2 for a bad host.
    """
    parser = ArgumentParser(
        prog="triptych secure-files",
        description="Makes certificates, a service token and an API key that protect a deployment."
        " Files that are there stay, certificates until 30 days before they expire.",
    )
    parser.add_argument("folder", type=Path, help="the folder; only its owner can read what is in it")
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
        print(f"triptych secure-files: --host: {error.message}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"triptych secure-files: cannot write {arguments.folder}: {error.strerror}", file=sys.stderr)
        return 1
    print(_SETTINGS.format(files=files, name=secure_files.SERVICE_NAME))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
