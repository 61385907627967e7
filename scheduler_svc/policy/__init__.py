"""Scheduling decisions.

`order` picks the next waiting request (with `tenant_counters` for fairness); `rules` pick the replica that
runs it, the kind of the next step, and the request that yields its slot. Imported by `dispatch`, `replica`,
`workers` and the settings. Imports only `adapters` and `requests`.
"""
