"""The sizes that the worker's rooms share: of the model, its KV groups and a deployment's static shapes.

`geometry` has KV groups and the sizes that a scheduler configures, `model_description` a model as its
configuration describes it. Imported by all rooms but `grammars`, `sampling` and `model_files`; imports only
`protos`.
"""
