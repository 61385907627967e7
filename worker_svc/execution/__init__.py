"""Runs plans: the worker, and the engine for models that generate tokens.

`worker` opens device and model and is configured through `engine`; `generation` implements that protocol with
`runner` and `memory_budget`. `runner` runs one plan: `batch` and `kv_cache` hold its state,
and `token_selection` has the step of each bucket and turns logits into results. `lockstep` keeps several
ranks on the same steps, `stage` joins those of a pipeline. Imported by `api`, `service` and `deploy`. Imports
`pooling`, `graphs`, `vllm_adapter`, `sampling`, `grammars`, `model_files`, `devices` and `shapes`.
"""
