"""Replaceable scheduling decisions.

`order` picks the next waiting request (with `tenant_counters` for fairness), `placement` the replica that
runs it, `interleave` the kind of the next step, and `preemption` the request that yields its slot. Each file
has an interface and its default. Imported by `dispatch`, `replica`, `pooling`, `workers` and the settings.
Imports only `adapters` and `requests`.
"""
