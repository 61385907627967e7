"""The worker: runs a model on a device for a scheduler.

`__main__` reads `settings` and runs `service`, which joins the rooms. From the top down: `api`
(gRPC), `execution` (plans), `vllm_adapter`, then `pooling`, `graphs`, `sampling`, `grammars` and
`model_files` side by side, then `devices`, then `shapes`. `phases` times a configuration, and
vLLM calls the entry point `vllm_platform`. Only `deploy` imports this package; it imports `protos`.
"""
