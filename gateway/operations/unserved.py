"""Missing routes of vLLM's server, and the advice for each."""

from collections.abc import Mapping
from typing import Final

_SLEEP: Final = "replicas do not sleep; stop a worker to free its memory"
_PAUSE: Final = "the scheduler does not pause; SIGTERM lets a worker finish its requests and end"
_WEIGHTS: Final = "weights are read at the start alone; start workers with the new model"
_PROFILE: Final = (
    "there is no profiler; /metrics has the times of steps, and --otlp-traces-endpoint writes spans"
)
_SCALE: Final = "replicas keep their size; start or stop workers with 'triptych worker'"
_FAULTS: Final = (
    "the scheduler resumes the requests of lost workers by itself; /health says whether one is ready"
)
_AUDIO: Final = "models read and write text alone"
_RENDER: Final = "/tokenize returns the tokens of a prompt, and /v1/completions takes token ids"
_COMPARE: Final = "ask /v1/completions for the logprobs of one token, or serve a reranker and use /score"

UNSERVED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("/sleep", "/wake_up", "/release_kv_cache_memory"), _SLEEP),
    **dict.fromkeys(("/pause", "/resume"), _PAUSE),
    "/abort_requests": "a client ends its request by closing the connection",
    **dict.fromkeys(
        (
            "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update",
            "/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version",
            "/weight_info", "/weight_checker", "/get_world_size",
        ),
        _WEIGHTS,
    ),
    "/collective_rpc": "workers run no methods by name; /server_info and /metrics say what runs",
    **dict.fromkeys(("/start_profile", "/stop_profile"), _PROFILE),
    **dict.fromkeys(("/scale_elastic_ep", "/is_scaling_elastic_ep"), _SCALE),
    **dict.fromkeys(("/fault_tolerance/apply", "/fault_tolerance/status"), _FAULTS),
    "/kv_event_sources": "the scheduler streams KV events over gRPC, at its own address",
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime"), _AUDIO),
    **dict.fromkeys(
        (
            "/v1/chat/completions/render", "/v1/chat/completions/derender", "/v1/completions/render",
            "/v1/completions/derender", "/v1/messages/render", "/v1/responses/render", "/inference/v1/generate",
        ),
        _RENDER,
    ),
    **dict.fromkeys(("/generative_scoring", "/v1/systemone"), _COMPARE),
    "/invocations": "send requests to the routes under /v1/",
    "/v1/chat/completions/batch": "send each conversation to /v1/chat/completions; they run together",
    "/v2/embed": "send texts to /v1/embeddings",
    "/cohere/v2/chat": "send conversations to /v1/chat/completions",
}  # fmt: skip
"""The reason for each path, with the advice."""
