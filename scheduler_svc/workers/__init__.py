"""Replicas of one deployment, and what drives the worker behind each.

`deployment` joins settings, engine and replicas. `step_loop` steps one worker, `grammar_compiler` has
grammars compiled, and `adapter_loader` has LoRA adapters loaded. `step_budget` and `failed_steps` say when a
worker counts as hung or broken; `losses` counts lost ones; `model_files` holds what the first worker says
about the model. `engine_protocol` is what generating and pooling deployments share; `generating` and
`pooling` implement it. Imported by `ranks`, `api`, `metrics` and `__main__`; imports `settings`, `convert`,
`dispatch`, `pooling` and the rooms below.
"""
