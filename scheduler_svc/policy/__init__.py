"""Scheduling decisions.

`order` picks the next waiting request, and `tenants` keeps shares and bounds; `rules` pick the replica that
runs it, the kind of the next step, and the request that yields its slot. Imported by `dispatch`, `replica`,
`workers` and the settings. Imports only `adapters` and `requests`.
"""
