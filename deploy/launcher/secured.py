"""What `triptych up --secure` adds to the settings."""

import socket
from pathlib import Path
from typing import Final

from deploy import secure_files
from deploy.launcher.settings import LaunchSettings
from deploy.secure_files import SecureFiles
from protos.errors import ConfigurationRefused

_WILDCARDS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared, not bound


def secured(settings: LaunchSettings) -> tuple[LaunchSettings, SecureFiles]:
    """Makes the files in the run dir and returns settings that use them. What the user has set stays.

    Raises:
        ConfigurationRefused: the files cannot be made.
    """
    folder = settings.run_dir.absolute() / "secure"
    hosts = [socket.gethostname(), *([] if settings.host in _WILDCARDS else [settings.host])]
    try:
        files = secure_files.make(folder, hosts)
    except OSError as error:
        raise ConfigurationRefused(f"--secure: cannot write {folder}: {error.strerror}") from error
    added: dict[str, Path | str | bool] = {}
    if settings.grpc_tls_ca is None:
        added |= {
            "grpc_tls_ca": files.ca,
            "grpc_tls_cert": files.service_cert,
            "grpc_tls_key": files.service_key,
            "grpc_tls_name": secure_files.SERVICE_NAME,
            "grpc_tls_require_client_cert": True,
        }
    if settings.service_token is None and settings.service_token_file is None:
        added["service_token_file"] = files.service_token
    if settings.ssl_certfile is None:
        added |= {"ssl_certfile": files.http_cert, "ssl_keyfile": files.http_key}
    if not settings.api_key and settings.api_key_file is None:
        added["api_key_file"] = files.api_keys
    return settings.model_copy(update=added), files
