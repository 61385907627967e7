"""Constrained output: grammars compiled in separate processes, matched per slot and applied to logits.

`spec` is a request's constraint; `lowering/` rewrites it to what xgrammar enforces. `compiler` caches
compiled grammars. It gets them through `compile_client` from processes of `compile_server`; `markers` gives a
tag's special tokens a text. `constraints` chooses the tokens of a step with one `matcher` per slot and the
`masks`. Only this package imports xgrammar. Imported by `execution` and `api`; imports only `devices` and
`protos`. This file imports nothing, because those processes must not load torch.
"""
