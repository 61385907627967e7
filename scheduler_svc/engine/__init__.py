"""All requests and all replicas of a deployment.

`engine` ties the parts together. `waiting` holds the registry of live requests, the waiting queue and its
limits; `grammar_queue` holds requests waiting for a grammar. `placement` chooses replicas, `adapter_control`
loads LoRA adapters, and `request_timeouts` bounds waiting. `prefix_control` serves clients' operations on
prefix caches; `load` provides figures for clients and metrics. Imported by `workers`, `api` and `metrics`;
imports `replica` and the rooms below.
"""
