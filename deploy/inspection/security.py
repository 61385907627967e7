"""Checks of certificates, keys and tokens. Their content is never shown."""

import ssl
from pathlib import Path

from deploy.diagnosis.findings import Findings, Missing
from gateway.settings import Settings as GatewaySettings
from protos.security.settings import CallSecuritySettings


def check(settings: CallSecuritySettings, findings: Findings) -> None:
    """Runs the checks of what is configured."""
    if settings.grpc_tls_ca or settings.service_token or settings.service_token_file:
        findings.check("service links", lambda: _links(settings))
    if not isinstance(settings, GatewaySettings):
        return
    certificate, key, file = settings.ssl_certfile, settings.ssl_keyfile, settings.api_key_file
    if certificate is not None:
        findings.check("certificate", lambda: _certificate(certificate, key, settings.ssl_ca_certs))
    if file is not None:
        findings.check("key file", lambda: _keys(file))


def _keys(file: Path) -> str:
    from gateway.keys.key_file import read_key_file  # needs the gateway's packages

    return f"{len(read_key_file(file))} keys in {file}"


def _links(settings: CallSecuritySettings) -> str:
    security = settings.link_security()
    parts = (
        ("TLS", security.certificates),
        ("a token", security.tokens),
    )
    return f"{' and '.join(name for name, part in parts if part is not None)} between services"


def _certificate(certificate: Path, key: Path | None, authorities: Path | None) -> str:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")
        if authorities is not None:
            context.load_verify_locations(authorities)
    except FileNotFoundError as error:
        raise Missing("a file of --ssl-certfile, --ssl-keyfile or --ssl-ca-certs does not exist") from error
    except OSError as error:
        text = error.strerror or type(error).__name__
        raise Missing(f"--ssl-certfile and --ssl-keyfile cannot be used: {text}") from error
    return f"{certificate} has the certificate and its key"
