"""All requests and all replicas of a generating deployment.

`engine` ties the parts together: `capacity` limits what may wait, `live_requests` finds requests by id,
`waiting_queue` and `grammar_queue` hold them, `placement` chooses replicas. `prefix_control` and
`pinned_prefixes` serve the clients' operations on prefix caches; `load` and `totals` hold figures for clients
and metrics. Imported by `pooling`, `convert`, `workers`, `api` and `metrics`; imports `replica` and the rooms
below.
"""
