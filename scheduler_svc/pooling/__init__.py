"""Pooling models: what `dispatch` and `replica` are for generating models.

`engine` holds all requests and replicas, `scheduler` runs one replica, `batching` chooses static batches,
`tasks` says what a model serves, and `no_prefixes` refuses the operations that need a prefix cache. Imported
by `convert` and `workers`; imports `dispatch` and the rooms below.
"""
