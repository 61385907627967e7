"""Settings that several services share: their logs, addresses and protected gRPC connections."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict

from protos.limits import MAX_CONCURRENT_RPCS
from protos.service.channels import LinkSecurity
from protos.service.logs import LogFormat, LogLevel
from protos.service.settings import Group, MayBeEmpty, ServiceSettings
from protos.service.tls import CertificatePaths, Certificates
from protos.service.tokens import ServiceTokens
from protos.service.tracing import OtlpEndpoint


class CommonSettings(ServiceSettings):
    """What a service writes about itself."""

    model_config = SettingsConfigDict(use_attribute_docstrings=True)

    groups: ClassVar[Mapping[Group, tuple[str, ...]]] = {
        Group.LOGGING: ("log_level", "log_format", "otlp_traces_endpoint"),
    }
    reference_names: ClassVar[Mapping[str, str | tuple[str, ...]]] = {"log_level": "VLLM_LOGGING_LEVEL"}

    log_level: LogLevel = "info"
    """Least severe level that is logged."""
    log_format: LogFormat = "json"
    """json for machines, console for people."""
    otlp_traces_endpoint: OtlpEndpoint | None = None
    """OTLP endpoint for traces, such as http://127.0.0.1:4317; needs the extra otel. Default: no traces."""


class CallSecuritySettings(CommonSettings):
    """How a service protects the gRPC calls that it makes."""

    groups: ClassVar[Mapping[Group, tuple[str, ...]]] = {
        Group.LINKS: (
            "grpc_tls_ca",
            "grpc_tls_cert",
            "grpc_tls_key",
            "grpc_tls_name",
            "service_token",
            "service_token_file",
        ),
    }

    grpc_tls_ca: Path | None = None
    """PEM file with the certificates that sign those of the other services. Turns TLS on between services.
    This and the next two files are read again when they change."""
    grpc_tls_cert: Path | None = None
    """PEM file with this service's own certificate, followed by intermediate certificates."""
    grpc_tls_key: Path | None = None
    """PEM file with the unencrypted key of --grpc-tls-cert."""
    grpc_tls_name: str | None = Field(None, min_length=1)
    """Expected name in the certificates of called services. Default: the called host. Needed for workers
    that register from changing addresses."""
    service_token: SecretStr | None = None
    """Secret that the services share, 16 characters or more. Calls send it; a scheduler or worker with a
    token refuses calls without it. Prefer the variable or the file: other users of the machine see flags."""
    service_token_file: Path | None = None
    """File with the service token. It is read again when it changes. Further lines are also accepted, to
    replace a token while services run."""

    @model_validator(mode="after")
    def _security_files_go_together(self) -> Self:
        if (self.grpc_tls_cert is None) != (self.grpc_tls_key is None):
            raise ValueError("--grpc-tls-cert and --grpc-tls-key go together; set both or neither")
        if self.grpc_tls_ca is None and (self.grpc_tls_cert is not None or self.grpc_tls_name is not None):
            raise ValueError("TLS between services needs --grpc-tls-ca, the CA of the other services")
        if self.service_token is not None and self.service_token_file is not None:
            raise ValueError("--service-token and --service-token-file are both set; set one of them")
        return self

    def link_security(self) -> LinkSecurity:
        """Reads the files; refuses missing and bad ones."""
        certificates = tokens = None
        if self.grpc_tls_ca is not None:
            paths = CertificatePaths(self.grpc_tls_ca, self.grpc_tls_cert, self.grpc_tls_key)
            certificates = Certificates(paths)
        if self.service_token is not None:
            tokens = ServiceTokens(token=self.service_token.get_secret_value())
        elif self.service_token_file is not None:
            tokens = ServiceTokens(file=self.service_token_file)
        return LinkSecurity(certificates, tokens, peer_name=self.grpc_tls_name)


class LinkSecuritySettings(CallSecuritySettings):
    """Where a service listens for gRPC calls, and how it protects these and its own."""

    groups: ClassVar[Mapping[Group, tuple[str, ...]]] = {
        Group.ADDRESSES: ("host", "socket", "max_concurrent_rpcs"),
        Group.LINKS: ("grpc_tls_require_client_cert",),
    }

    host: MayBeEmpty = "127.0.0.1"
    """Address to listen on. Empty: only on --socket."""
    socket: Path | None = None
    """Unix socket to listen on, too: `unix:PATH` for services of this machine. A scheduler calls a
    worker that registered at its socket at the worker's own, if that has one."""
    max_concurrent_rpcs: int = Field(MAX_CONCURRENT_RPCS, ge=16)
    """gRPC calls that a service runs at once, a stream counting as one. Further ones are refused with
    RESOURCE_EXHAUSTED."""
    grpc_tls_require_client_cert: bool = False
    """Refuse connections without a client certificate from --grpc-tls-ca (mTLS)."""

    @model_validator(mode="after")
    def _port_has_a_certificate(self) -> Self:
        if self.grpc_tls_ca is not None and self.grpc_tls_cert is None:
            raise ValueError(
                "with --grpc-tls-ca this service listens with TLS, too: set --grpc-tls-cert and --grpc-tls-key"
            )
        if self.grpc_tls_require_client_cert and self.grpc_tls_ca is None:
            raise ValueError("--grpc-tls-require-client-cert needs TLS: set --grpc-tls-ca, -cert and -key")
        return self

    def link_security(self) -> LinkSecurity:
        """Reads the files; refuses missing and bad ones."""
        calls = super().link_security()
        return LinkSecurity(
            calls.certificates, calls.tokens, self.grpc_tls_require_client_cert, calls.peer_name
        )
