"""The decisions of one replica: which requests hold a slot, what the next step does, and what a result means.

`scheduler` decides a step and takes in its result; `pipeline` plans for a worker of several stages. They
compose `slots` (requests with a slot), `decode_batch` (those that decode), `plans` (what the next plan tells
the worker, and plans without a result), `suspects` (requests that may have killed a worker), `shared_prefill`
(requests that wait for a prefix another one computes), `outputs` (from results to events) and `stats`.
`pooling` decides the batches of a pooling model. Plans and results are types of `protos.steps`. Synchronous
and free of I/O. Imported by `engine`, `workers` and the metrics. Imports `kv`, `adapters`, `policy`,
`requests` and `shapes`.
"""
