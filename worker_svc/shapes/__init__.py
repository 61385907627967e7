"""Sizes shared by the worker's rooms: of the model, its KV groups and a deployment's static shapes.

`shape_config` defines KV groups and the scheduler's sizes, `model_description` a model by its configuration.
Imported by all rooms but `grammars`, `sampling` and `model_files`; imports only `protos`.
"""
