"""Scheduling decisions.

`order` picks the next waiting request, and `tenants` keeps shares and bounds; `rules` choose the kind of the
next step, and the request to preempt. `learned_times` learns how long steps take. Imported by `engine`,
`replica`, `workers` and the settings. Imports only `adapters` and `requests`.
"""
