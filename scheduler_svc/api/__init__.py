"""The scheduler's gRPC services, and the translation between clients' messages and the scheduler's types.

`inference` serves clients, with `lora_service` for LoRA adapters; `messages` reads requests and writes
events. `events` and `kv_watch` buffer the output of step loops for streams. `registry` accepts ranks and
starts a driver for each replica. Imported by `__main__`; imports `metrics`, `workers`, `engine` and
`requests`.
"""
