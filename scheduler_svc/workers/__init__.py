"""The workers of one deployment: ranks join and form replicas, which are configured, driven and lost.

`group` collects the registered ranks of a replica, described in `rank`. Once complete, `driver` drives them
to their end: `configure` configures all, and `step_loop` steps rank 0. `grammar_compiler` and
`adapter_loader` call workers for requests; `step_timeout`, `progress` and `losses` detect hung, stalled and
broken workers. `deployment` joins settings, engine and replicas; `replicas` sets up generating and pooling
replicas from their `descriptions`, and `model_files` holds the served model. Imported by `api`, `metrics`
and `__main__`; imports `settings`, `engine` and the rooms below.
"""
