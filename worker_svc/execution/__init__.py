"""Runs plans: the worker, and the engines of generating and pooling models.

`worker` opens device and model and is configured through `engine`. `runner` runs one plan: `batch` and
`kv_cache` hold its state, and `token_selection` has the step of each bucket and turns logits into results.
`lockstep` keeps several ranks on the same steps, `stage` joins those of a pipeline. Imported by `api`,
`service` and `deploy`. Imports `pooling`, `graphs`, `vllm_adapter`, `sampling`, `grammars`, `model_files`,
`devices` and `shapes`.
"""
