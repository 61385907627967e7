"""Scheduling decisions.

`order` picks the next waiting request, and `tenants` keeps shares and bounds; `rules` pick the kind of the
next step, and the request that yields its slot. `learned_times` learns how long steps take. Imported by
`engine`, `replica`, `workers` and the settings. Imports only `adapters` and `requests`.
"""
