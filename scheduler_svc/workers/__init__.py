"""Workers as replicas of one deployment.

`deployment` joins settings, engine and replicas. `driver` takes one worker from registration to its end with
the help of `step_loop` and `grammar_compiler`. `step_budget` and `failed_steps` say when a worker counts as
hung or broken; `model_files` holds what the first worker says about the model. `engine_protocol` is what
generating and pooling deployments share; `generating` and `pooling` implement it. Imported by `api`,
`metrics` and `__main__`; imports `settings`, `convert`, `dispatch`, `pooling` and the rooms below.
"""
