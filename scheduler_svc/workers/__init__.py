"""Replicas of one deployment, and what drives the worker behind each.

`deployment` joins settings, engine and replicas. `step_loop` steps one worker, `grammar_compiler` has
grammars compiled, and `adapter_loader` has LoRA adapters loaded. `step_budget` and `losses` say when a
worker counts as hung or broken; `descriptions` reads a worker's description, and
`model_files` holds the first worker's files. `engine_protocol` is the interface between replicas' schedulers
and drivers; `replicas` sets both kinds up. Imported by `ranks`, `api`, `metrics` and `__main__`; imports
`settings`, `dispatch` and the rooms below.
"""
