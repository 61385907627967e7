"""Pooling models: what `dispatch` and `replica` are for generating models.

`engine` holds all requests and replicas, `scheduler` runs one replica, `batching` chooses static batches,
`tasks` says what a model serves, and `stand_ins` refuses operations that need a prefix cache or LoRA
adapters. Imported by `workers`; imports `dispatch` and the rooms below.
"""
