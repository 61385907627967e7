"""The flags of vLLM's API server."""

from deploy.vllm_flags import conversions, parsers
from deploy.vllm_flags.flag import mapped, moot, refused, same

FRONTEND = [
    *same("--config", note="sections by service are allowed, too"),
    *mapped(
        "--api-server-count -asc",
        "--gateways",
        "counts gateway processes, which share the port",
        convert=conversions.count("--gateways"),
    ),
    *same("--host", "--port", "--root-path", "--uds"),
    *same("--allow-credentials", form="switch"),
    *same("--allowed-origins", "--allowed-methods", "--allowed-headers"),
    *same("--api-key", form="values"),
    *same("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers"),
    *same("--enable-ssl-refresh", form="switch"),
    *same("--lora-modules", form="values"),
    *same("--chat-template", "--default-chat-template-kwargs"),
    *same("--sse-keep-alive-interval"),
    *same("--enable-log-requests", form="switch"),
    *same("--enable-tokenizer-info-endpoint", "--disable-fastapi-docs", form="switch"),
    *same("--trust-request-chat-template", "--enable-force-include-usage", form="switch"),
    *mapped(
        "--tool-call-parser",
        "--tool-call-parser",
        "names a parser of ours if one has that name, and else vLLM's, which needs an installed vLLM",
        convert=parsers.tool_parser,
    ),
    *mapped(
        "--reasoning-parser",
        "--reasoning-parser",
        "names a parser of ours if one has that name, and else vLLM's, which needs an installed vLLM",
        convert=parsers.reasoning_parser,
    ),
    *mapped(
        "--uvicorn-log-level",
        "--log-level",
        "sets the level of all services, not of the HTTP server alone",
        convert=conversions.choice("--log-level", {"trace": "debug", "critical": "error"}),
    ),
    *mapped(
        "--log-level",
        "--log-level",
        "sets the level of all services; ours are lower-case",
        convert=lambda text: conversions.choice("--log-level", {"critical": "error", "notset": "debug"})(
            text.lower()
        ),
    ),
    *moot("tools are always available", "--enable-auto-tool-choice", form="switch"),
    *moot("the form of a message's content follows the template", "--chat-template-content-format"),
    *moot("usage always has them", "--enable-prompt-tokens-details", form="switch"),
    *moot("/load always answers", "--enable-server-load-tracking", form="switch"),
    *moot("every answer has X-Request-Id", "--enable-request-id-headers", form="switch"),
    *moot("the pages of the API need no network", "--enable-offline-docs", form="switch"),
    *moot("errors of the service are always logged with their stack", "--log-error-stack", form="switch"),
    *moot(
        "the gateway writes one line for each request; --log-level warning hides them",
        "--disable-uvicorn-access-log",
        form="switch",
    ),
    *moot(
        "the gateway does not log requests to /metrics, /health and other probes",
        "--disable-access-log-for-endpoints",
    ),
    *moot("headers are limited as the HTTP parser limits them", "--h11-max-incomplete-event-size"),
    *moot("headers are limited as the HTTP parser limits them", "--h11-max-header-count"),
    *moot("late interaction always runs in the worker", "--enable-flash-late-interaction", form="switch"),
    *moot("a request's tokens are not logged one by one", "--enable-log-deltas", form="switch"),
    *moot("there is no Cohere API here", "--cohere-is-reasoning-model", form="switch"),
    *moot("there is no Cohere API here", "--cohere-format"),
    *moot("a disabled thinking block turns thinking off", "--anthropic-disabled-thinking-effort"),
    *moot("the gateway keeps no statistics that a flag could turn off", "--disable-log-stats", form="switch"),
    *moot("the scheduler's statistics cover all replicas", "--aggregate-engine-logging", form="switch"),
    *moot("`triptych doctor` checks the environment", "--fail-on-environ-validation", form="switch"),
    *moot("running requests get 5 s after SIGTERM", "--shutdown-timeout"),
    *refused(
        "logs prompts and answers of clients; log them in the client", "--enable-log-outputs", form="switch"
    ),
    *moot("prompts are not logged", "--max-log-len"),
    *refused(
        "is not a setting; send return_tokens_as_token_ids in the request",
        "--return-tokens-as-token-ids",
        form="switch",
    ),
    *refused("is not served; read them from /metrics", "--enable-per-request-metrics", form="switch"),
    *refused(
        "is not served; omit the tools in requests with tool_choice none",
        "--exclude-tools-when-tool-choice-none",
        form="switch",
    ),
    *refused("is not served; mark tools as strict in the request", "--tool-strict-level", harmless=("auto",)),
    *refused(
        "would load code into the gateway; use --tool-call-parser vllm:NAME",
        "--tool-parser-plugin",
        harmless=("",),
    ),
    *refused(
        "would load code into the gateway; use --reasoning-parser vllm:NAME",
        "--reasoning-parser-plugin",
        harmless=("",),
    ),
    *refused("would load code into the gateway; put a proxy in front", "--middleware"),
    *refused("is not served; call tools in the client", "--tool-server"),
    *refused("is always assistant; rename it in the client", "--response-role", harmless=("assistant",)),
    *refused("is not served: models read text alone", "--trust-request-mm-kwargs", form="switch"),
    *refused(
        "is not served; clients with tokens call the scheduler's gRPC API (--scheduler-port)",
        "--tokens-only",
        "--enable-scale-out",
        form="switch",
    ),
    *refused(
        "is not served; direct gRPC clients use --scheduler-port, see docs/api-grpc.md",
        "--grpc",
        form="switch",
    ),
    *refused("is not served; direct gRPC clients use --scheduler-port, see docs/api-grpc.md", "--grpc-port"),
    *refused("is not served; start `triptych worker` on each host", "--headless", form="switch"),
    *refused("is always made from version and settings", "--fingerprint-mode", harmless=("full", "hash")),
    *refused("is always made from version and settings", "--fingerprint-value"),
]
