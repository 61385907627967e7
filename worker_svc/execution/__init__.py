"""Runs plans: the worker and its engine.

`worker` opens device and model, `engine` takes a configuration. `runner` runs a plan: `batch` and `kv_cache`
hold its state, and `token_selection` turns logits into results.
`lockstep` keeps several ranks on the same steps, `stage` joins those of a pipeline. Imported by `api`,
`service` and `deploy`. Imports `pooling`, `graphs`, `vllm_adapter`, `sampling`, `grammars`, `model_files`,
`devices` and `shapes`.
"""
