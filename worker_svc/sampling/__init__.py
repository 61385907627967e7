"""Token sampling on the device: static functions of [rows, vocab] that handle all rows of a step at once.

`state` holds the slots' parameters as tensors, a row per slot packed for a single copy;
a step gathers its rows. `sampler.sample` applies them in vLLM's order: `adjust` (masks, bad words,
`min_tokens`, `logit_bias`, penalties), then either the largest logit (greedy) or temperature, `filters`
(`min_p`, `top_k`, `top_p`; `triton_search` on GPUs) and `draw`. Log-probabilities are those of the model's
own logits, before any of this. `workspace` is the steps' memory, which `state` counts. A step computes only
the needs of its rows (`state.SamplingOps`). Nothing here waits for the device, so steps can be captured.
Imported by `execution`; imports only `devices` and `protos`.
"""
