"""Adapts vLLM: every import of it in the worker is here.

`building` makes a model's layers, and `model` loads and runs them. vLLM finds `platform` and `attention` as
plug-ins; the modules of `layers` replace some of its layers. `configuration` and `description` translate
between its view of a model and ours, `pooling` reads poolers, `startup` imports vLLM, `deferred_imports` what
of it can wait, `weights` reads files. `execution` imports this room; it imports `devices`, `graphs`, `shapes`
and `model_files`. This file imports nothing: vLLM imports `platform` while vLLM itself is half imported.
"""
