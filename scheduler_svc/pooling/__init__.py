"""Pooling models: what `dispatch` and `replica` are for generating models.

`engine` holds all requests and replicas, `scheduler` runs one replica, `batching` chooses static batches,
`tasks` says what a model serves, `no_prefixes` refuses the operations that need a prefix cache, and
`no_adapters` those that need LoRA adapters. Imported by `convert` and `workers`; imports `dispatch` and the
rooms below.
"""
