"""The scheduler's gRPC services: RPCs parse their requests, call the engine and build the answers.

`inference` serves clients, with `event_buffer` and `kv_watch` between step loops and streams and
`lora_service` for LoRA adapters. `registry` accepts ranks and starts a driver for each replica. Imported by
`__main__`; imports `metrics`, `ranks`, `workers`, `convert`, `dispatch` and `requests`.
"""
