"""The gateway's settings for keys, TLS and browsers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from protos.settings import Group, ServiceSettings


class SecuritySettings(ServiceSettings):
    """Who may call the gateway, and how connections are protected."""

    groups: ClassVar[Mapping[Group, tuple[str, ...]]] = {
        Group.SECURITY: (
            "api_key",
            "api_key_file",
            "admin_api_key",
            "metrics_access",
            "ssl_certfile",
            "ssl_keyfile",
            "ssl_ca_certs",
            "ssl_cert_reqs",
            "ssl_ciphers",
            "enable_ssl_refresh",
            "allowed_origins",
            "allowed_methods",
            "allowed_headers",
            "allow_credentials",
        ),
    }
    reference_names: ClassVar[Mapping[str, str | tuple[str, ...]]] = {"api_key": "VLLM_API_KEY"}

    api_key: Annotated[
        tuple[SecretStr, ...],
        NoDecode,
        Field(
            description="Keys of which every request needs one, as bearer token or in the header x-api-key. Several"
            " follow one another; the variable takes one key, or a JSON list of keys. Prefer the variable: other"
            " users of the machine see flags."
        ),
    ] = ()
    api_key_file: Annotated[
        Path | None,
        Field(
            description="YAML or JSON file with further keys, each with its tenant, rights and limits, for example"
            " /etc/triptych/keys.yaml. A changed file counts from the next"
            " request on."
        ),
    ] = None
    admin_api_key: Annotated[
        SecretStr | None,
        Field(
            min_length=1,
            description="A key with admin rights: with it, clients load and unload LoRA adapters. Alone, it does not"
            " make other requests need a key. Prefer the variable: other users of the machine see flags.",
        ),
    ] = None

    metrics_access: Annotated[
        Literal["open", "admin"],
        Field(
            description="Whether /metrics, on every port, is open, or needs a key with admin rights; it shows names of"
            " keys and what they use."
        ),
    ] = "open"
    ssl_certfile: Annotated[
        Path | None,
        Field(
            description="PEM file with the server's certificate, followed by its chain, for example"
            " /etc/triptych/tls/tls.crt. With it, the HTTP ports serve TLS."
        ),
    ] = None
    ssl_keyfile: Annotated[
        Path | None,
        Field(
            description="PEM file with the certificate's key, without a passphrase; if unset, --ssl-certfile has"
            " the key."
        ),
    ] = None
    ssl_ca_certs: Annotated[
        Path | None,
        Field(description="PEM file with the certificates that sign those of clients; see --ssl-cert-reqs."),
    ] = None
    ssl_cert_reqs: Annotated[
        Literal[0, 1, 2],
        Field(
            description="Whether clients show a certificate: 0 no, 1 they may, 2 they must. A shown certificate must"
            " be signed by one of --ssl-ca-certs."
        ),
    ] = 0
    ssl_ciphers: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Ciphers for TLS 1.2 in OpenSSL's words, for example ECDHE+AESGCM; TLS 1.3 has its own.",
        ),
    ] = None
    enable_ssl_refresh: Annotated[
        bool,
        Field(description="Read the files of --ssl-* again when they change; new connections use them."),
    ] = True

    allowed_origins: Annotated[
        tuple[str, ...],
        NoDecode,
        Field(
            description="Origins whose web pages may call the API from a browser, for example"
            " https://chat.example.com; * allows all. Without it, browsers refuse all of them (no CORS headers)."
        ),
    ] = ()
    allowed_methods: Annotated[
        tuple[str, ...],
        NoDecode,
        Field(description="Methods that these pages may use, for example GET POST."),
    ] = ("*",)
    allowed_headers: Annotated[
        tuple[str, ...],
        NoDecode,
        Field(
            description="Request headers that these pages may send, for example Authorization Content-Type."
        ),
    ] = ("*",)
    allow_credentials: Annotated[
        bool, Field(description="Let browsers send these pages' cookies and client certificates.")
    ] = False

    @field_validator("api_key", mode="before")
    @classmethod
    def _are_keys(cls, value: object) -> object:
        """Reads a variable: one key or a JSON list; or a flag's keys, quoted with commas between them."""
        if isinstance(value, str):
            value = _json_list(value) if value.startswith(("[", '"')) else (value,)
        if isinstance(value, tuple | list) and "" in value:
            raise ValueError("has an empty key; set a key, or omit the flag")
        return value

    @field_validator("allowed_origins", "allowed_methods", "allowed_headers", mode="before")
    @classmethod
    def _are_several(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return _json_list(value) if value.startswith("[") else tuple(value.split(","))

    @field_validator("ssl_cert_reqs", mode="before")
    @classmethod
    def _is_number(cls, value: object) -> object:
        return int(value) if isinstance(value, str) and value.isdigit() else value

    @model_validator(mode="after")
    def _tls_is_complete(self) -> Self:
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs):
            raise ValueError("--ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile; set it")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError(
                f"--ssl-cert-reqs {self.ssl_cert_reqs} needs --ssl-ca-certs, which says whose certificates count"
            )
        return self


def _json_list(text: str) -> tuple[object, ...]:
    try:
        return tuple(json.loads(text if text.startswith("[") else f"[{text}]"))
    except ValueError:
        raise ValueError('is not a JSON list; write ["one", "two"]') from None
