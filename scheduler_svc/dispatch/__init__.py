"""All requests and all replicas of a generating deployment.

`engine` ties the parts together: `queueing` holds all requests and those that wait, within its limits;
`grammar_queue` those that wait for a grammar; `placement` chooses replicas. `prefix_control` and
`pinned_prefixes` serve the clients' operations on prefix caches; `load` and `totals` hold figures for clients
and metrics. Imported by `pooling`, `convert`, `workers`, `api` and `metrics`; imports `replica` and the rooms
below.
"""
