"""The scheduler's gRPC services: RPCs parse their requests, call the engine and build the answers.

`inference` serves clients, with `event_buffer` and `kv_watch` between step loops and streams and
`pin_service` for pinned prefixes. `registry` accepts workers and starts a driver for each. Imported by
`__main__`; imports `metrics`, `workers`, `convert`, `dispatch` and `requests`.
"""
