"""The scheduler's gRPC services, and the translation between clients' messages and the scheduler's types.

`inference` serves clients, with `lora_service` for LoRA adapters; `messages` reads requests and writes
events. `events` and `kv_watch` stand between step loops and streams. `registry` accepts ranks and starts a
driver for each replica. Imported by `__main__`; imports `metrics`, `ranks`, `workers`, `dispatch` and
`requests`.
"""
