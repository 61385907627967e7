"""The only modules that turn protocol messages into the scheduler's types and back.

`inference` reads clients' requests and writes their events; `connect_stream` writes the events of many
requests on one stream. `kv_events` writes cache events, `load` load reports. `model` and `configuration`
translate a worker's description and its configuration. Step plans and results are translated by
:mod:`protos.step_messages`, which the worker shares.

`api` and `workers` import this package; it imports `pooling`, `dispatch`, `requests`, `kv` and `shapes`.
"""
