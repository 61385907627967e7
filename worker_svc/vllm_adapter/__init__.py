"""Adapts vLLM: every import of it in the worker is here.

`building` makes a model's layers and describes them, `weights` compares files with them and reads them, and
`model` runs them. vLLM finds `platform` and `attention` as plug-ins; the modules of `layers` replace some of
its layers. `configuration` is its view of a model, `pooling_head` reads poolers, and `startup` imports vLLM.
`execution` imports this room; it imports `devices`, `graphs`, `shapes` and `model_files`. This file imports
nothing: vLLM imports `platform` during its own import.
"""
