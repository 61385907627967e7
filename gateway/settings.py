"""The gateway's settings: flags, or ``TRIPTYCH_*`` variables of the same name."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from gateway.parsers.formats import ALIASES, FORMATS
from gateway.parsers.reasoning import THINKING_ALIASES, THINKING_FORMATS
from protos.limits import MAX_LOGPROBS
from protos.service.common_settings import CallSecuritySettings
from protos.service.settings import Group, MayBeEmpty, ServiceSettings

HARMONY: Final = "openai"
"""The format of gpt-oss, for thinking and calls at once."""

TOOL_FORMATS: Final = (*FORMATS, *ALIASES, HARMONY)
"""Names of formats of tool calls."""

_HARMONY_NAMES: Final = ("openai_gptoss", "gpt_oss")

REASONING_FORMATS: Final = (*THINKING_FORMATS, *THINKING_ALIASES, *_HARMONY_NAMES)
"""Names of formats of thinking."""

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much clients ask a model to think; also `gateway.schemas.sampling.Effort`."""

VLLM_PREFIX: Final = "vllm:"
"""May begin the name of a parser, as in other versions."""


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

    api_key: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (),
        description="Keys of which every request needs one, as bearer token or in the header x-api-key. Several"
        " follow one another; the variable takes one key, or a JSON list of keys. Prefer the variable: other"
        " users of the machine see flags.",
    )
    api_key_file: Path | None = Field(
        None,
        description="YAML or JSON file with further keys, each with its tenant, rights and limits, for example"
        " /etc/triptych/keys.yaml. A changed file counts from the next"
        " request on.",
    )
    admin_api_key: SecretStr | None = Field(
        None,
        min_length=1,
        description="A key with admin rights: with it, clients load and unload LoRA adapters. Alone, it does not"
        " make other requests need a key. Prefer the variable: other users of the machine see flags.",
    )

    metrics_access: Literal["open", "admin"] = Field(
        "open",
        description="Whether /metrics, on every port, is open, or needs a key with admin rights; it shows names of"
        " keys and what they use.",
    )
    ssl_certfile: Path | None = Field(
        None,
        description="PEM file with the server's certificate, followed by its chain, for example"
        " /etc/triptych/tls/tls.crt. With it, the HTTP ports serve TLS.",
    )
    ssl_keyfile: Path | None = Field(
        None,
        description="PEM file with the certificate's key, without a passphrase; if unset, --ssl-certfile has"
        " the key.",
    )
    ssl_ca_certs: Path | None = Field(
        None, description="PEM file with the certificates that sign those of clients; see --ssl-cert-reqs."
    )
    ssl_cert_reqs: Literal[0, 1, 2] = Field(
        0,
        description="Whether clients show a certificate: 0 no, 1 they may, 2 they must. A shown certificate must"
        " be signed by one of --ssl-ca-certs.",
    )
    ssl_ciphers: str | None = Field(
        None,
        min_length=1,
        description="Ciphers for TLS 1.2 in OpenSSL's words, for example ECDHE+AESGCM; TLS 1.3 has its own.",
    )
    enable_ssl_refresh: bool = Field(
        True, description="Read the files of --ssl-* again when they change; new connections use them."
    )

    allowed_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Origins whose web pages may call the API from a browser, for example"
        " https://chat.example.com; * allows all. Without it, browsers refuse all of them (no CORS headers).",
    )
    allowed_methods: Annotated[tuple[str, ...], NoDecode] = Field(
        ("*",), description="Methods that these pages may use, for example GET POST."
    )
    allowed_headers: Annotated[tuple[str, ...], NoDecode] = Field(
        ("*",),
        description="Request headers that these pages may send, for example Authorization Content-Type.",
    )
    allow_credentials: bool = Field(
        False, description="Let browsers send these pages' cookies and client certificates."
    )

    @field_validator("api_key", mode="before")
    @classmethod
    def _are_keys(cls, value: object) -> object:
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
        return _json_list(value) if value.startswith("[") else tuple(filter(None, value.split(",")))

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


_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[^:/\s]+):(\d{1,5})")


class Settings(CallSecuritySettings, SecuritySettings):
    """Serves the HTTP API of a scheduler."""

    model_config = SettingsConfigDict(cli_prog_name="triptych gateway")

    section: ClassVar[str] = "gateway"
    groups: ClassVar[Mapping[Group, tuple[str, ...]]] = {
        Group.HTTP_API: (
            "chat_template",
            "default_chat_template_kwargs",
            "reasoning_effort_budgets",
            "tool_call_parser",
            "reasoning_parser",
            "dev_mode",
            "enable_tokenizer_info_endpoint",
            "disable_fastapi_docs",
            "enable_force_include_usage",
            "max_body_bytes",
            "max_total_body_bytes",
            "max_prompts",
            "max_logprobs",
            "max_inputs",
            "max_pooled_values",
            "model_poll_s",
            "keep_alive_s",
            "sse_keep_alive_interval",
            "max_parked_requests",
            "max_connections",
            "max_waiting_texts",
            "max_unread_answer_bytes",
        ),
        Group.ADDRESSES: (
            "host",
            "port",
            "uds",
            "root_path",
            "reuse_port",
            "metrics_folder",
            "metrics_port",
            "scheduler_address",
        ),
        Group.TIMEOUTS: (
            "resume_timeout_s",
            "park_timeout_s",
            "call_timeout_s",
            "drain_s",
            "read_timeout_s",
            "write_timeout_s",
        ),
        Group.LOGGING: ("enable_log_requests",),
    }

    reference_names: ClassVar[Mapping[str, str | tuple[str, ...]]] = {
        "keep_alive_s": "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
        "max_prompts": "VLLM_MAX_COMPLETION_PROMPTS",
        "dev_mode": "VLLM_SERVER_DEV_MODE",
    }

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 picks a free one, which the log names.")
    uds: Path | None = Field(
        None,
        description="Unix socket to listen on instead of --host and --port, for example"
        " /run/triptych/http.sock.",
    )
    root_path: MayBeEmpty = Field(
        "",
        pattern=r"^(/[^/\s]+)*$",
        description="Path of a proxy that leads here, for example /llm; requests may have it or not. Empty: none.",
    )
    reuse_port: bool = Field(
        False,
        description="Let other gateways of this machine listen on the same port. Linux spreads connections"
        " over all of them.",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="A second HTTP port, which only this process has: for /metrics and /health of one of"
        " several gateways that share a port. `triptych up` adds the gateway's number.",
    )
    metrics_folder: Path | None = Field(
        None,
        description="A folder that all gateways behind a shared port have in common, for example"
        " /run/triptych/metrics. `/metrics` on that port is then the sum over all of them, and the limits of"
        " keys hold for all together.",
    )
    scheduler_address: str = Field(
        "127.0.0.1:50051", description="Address of the scheduler, host:port or unix:PATH."
    )
    max_body_bytes: int = Field(
        8 * 1024 * 1024,
        ge=1024,
        le=14 * 1024 * 1024,
        description="Largest request body, bytes; a larger one gets 413.",
    )
    max_total_body_bytes: int = Field(
        48 << 20,
        ge=2048,
        description="Most bytes of the bodies of all requests under way. A tenant may hold as many as are free,"
        " half of them if it is alone; a request beyond that gets 429. A quarter is for bodies up to 256 KiB. Less than"
        " three times --max-body-bytes counts as that.",
    )
    max_prompts: int = Field(
        128,
        ge=1,
        le=4096,
        description="Most prompts in one completions request, and most conversations in one batch of chats.",
    )
    max_logprobs: int = Field(
        MAX_LOGPROBS,
        ge=0,
        le=MAX_LOGPROBS,
        description="Most log-probabilities that a request may ask for with each token.",
    )
    max_inputs: int = Field(2048, ge=1, le=65536, description="Most texts in one request to a pooling model.")
    max_pooled_values: int = Field(
        8 * 1024 * 1024,
        ge=1,
        description="Most values in the results of one request to a pooling model: its inputs, or their tokens"
        " for tasks of tokens, times the size of a vector.",
    )
    resume_timeout_s: float = Field(
        60.0, ge=0, le=3600, description="How long running requests wait for a lost scheduler, seconds."
    )
    park_timeout_s: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="How long new requests wait for a scheduler with a ready worker before they get 503,"
        " seconds; 0: not at all.",
    )
    max_parked_requests: int = Field(
        1024,
        ge=0,
        le=65536,
        description="Most new requests that wait for a scheduler with a ready worker, each prompt counted;"
        " the next one gets 503.",
    )
    model_poll_s: float = Field(
        5.0, gt=0, le=3600, description="How often to look up the served model, seconds."
    )
    call_timeout_s: float = Field(
        5.0, gt=0, le=600, description="Deadline of short calls to the scheduler, seconds."
    )
    drain_s: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="How long running requests may continue after SIGTERM or SIGINT, seconds.",
    )
    keep_alive_s: int = Field(
        75, ge=0, le=3600, description="How long an idle HTTP connection is kept, seconds; 0: not."
    )

    sse_keep_alive_interval: float = Field(
        0.0,
        ge=0,
        le=3600,
        description="Seconds without an event after which a streamed answer gets a comment, so that proxies keep"
        " its connection, also before its first token; 0: never.",
    )

    read_timeout_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="How long a client may take to send a request's headers, and again its body, seconds.",
    )
    write_timeout_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="How long an answer may wait for a client that does not read it, seconds; then its"
        " request is aborted.",
    )
    max_connections: int = Field(
        4096, ge=1, le=1_000_000, description="Most HTTP connections at a time; one more request gets 503."
    )
    max_waiting_texts: int = Field(
        256,
        ge=0,
        le=65536,
        description="Most long texts that wait for a thread that reads them, and as many above 256 KiB, which"
        " have threads of their own; of a tenant, as many as places are free. The next request gets 429.",
    )

    max_unread_answer_bytes: int = Field(
        48 << 20,
        ge=4096,
        description="Most bytes of answers not yet read by slow clients, all together; beyond them the answer"
        " with the most unread bytes ends, with an error if it is a stream, and its request is aborted.",
    )

    chat_template: str | None = Field(
        None,
        min_length=1,
        description="Chat template to use instead of the model's own: a file, or the Jinja text itself.",
    )
    default_chat_template_kwargs: Annotated[dict[str, Any], NoDecode] = Field(
        {},
        description='JSON with variables of the chat template, for example {"enable_thinking": false}. A'
        " request's chat_template_kwargs and reasoning_effort come before them.",
    )
    reasoning_effort_budgets: Annotated[dict[Effort, Annotated[int, Field(ge=0, lt=2**32)]], NoDecode] = (
        Field(
            {},
            description="JSON with the most tokens of a thought by the effort that a request asks for, for example"
            ' {"low": 1024, "medium": 8192}. A request\'s thinking_token_budget or budget_tokens comes before them;'
            " efforts that are not named have no limit.",
        )
    )
    enable_log_requests: bool = Field(
        False, description="Log each request's parameters and number of tokens; its texts are never logged."
    )
    tool_call_parser: str = Field(
        "auto",
        description="How the model writes tool calls: auto (as its chat template shows), none, or "
        f"{', '.join(TOOL_FORMATS)}. vllm:NAME means NAME.",
    )
    reasoning_parser: str = Field(
        "auto",
        description="How the model marks its thinking: auto (as its chat template shows), none, "
        f"or {', '.join(REASONING_FORMATS)}. vllm:NAME means NAME.",
    )

    enable_force_include_usage: bool = Field(
        False,
        description="Put token counts into every chunk of streamed chats and completions, and into one at the end,"
        " whatever the request's stream_options say.",
    )
    dev_mode: bool = Field(
        False,
        description="Let requests without admin rights use /server_info, /tokenizer_info and /reset_prefix_cache;"
        " for machines that only you reach.",
    )
    enable_tokenizer_info_endpoint: bool = Field(
        False, description="Let requests without admin rights use /tokenizer_info."
    )
    disable_fastapi_docs: bool = Field(False, description="Do not serve /docs, /redoc and /openapi.json.")

    @field_validator("default_chat_template_kwargs", "reasoning_effort_budgets", mode="before")
    @classmethod
    def _is_object(cls, value: object, info: ValidationInfo) -> object:
        try:
            return json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            own = (
                '{"low": 1024}'
                if info.field_name == "reasoning_effort_budgets"
                else '{"enable_thinking": false}'
            )
            raise ValueError(f"must be JSON, for example {own}") from error

    @model_validator(mode="after")
    def _one_address(self) -> Self:
        if self.uds is not None and self.reuse_port:
            raise ValueError("--reuse-port shares a port, and --uds has none; omit one of them")
        return self

    @field_validator("tool_call_parser")
    @classmethod
    def _is_tool_format(cls, value: str) -> str:
        name = value.removeprefix(VLLM_PREFIX)
        if name not in ("auto", "none", *TOOL_FORMATS):
            raise ValueError(f"must be auto, none or one of {', '.join(TOOL_FORMATS)}")
        return ALIASES.get(name, name)

    @field_validator("reasoning_parser")
    @classmethod
    def _is_reasoning_format(cls, value: str) -> str:
        name = value.removeprefix(VLLM_PREFIX)
        if name not in ("auto", "none", HARMONY, *REASONING_FORMATS):
            raise ValueError(f"must be auto, none or one of {', '.join(REASONING_FORMATS)}")
        return HARMONY if name in _HARMONY_NAMES else THINKING_ALIASES.get(name, name)

    @field_validator("scheduler_address")
    @classmethod
    def _is_address(cls, value: str) -> str:
        match = _ADDRESS.fullmatch(value)
        if not (value.startswith("unix:") or (match and 0 < int(match[2]) < 65536)):
            raise ValueError("must be host:port or unix:PATH, for example 127.0.0.1:50051")
        return value
