"""Plain types that the worker's rooms share: shapes, the model's description, phases of a configuration.

``geometry`` has KV groups and static sizes, ``model_description`` what a model's configuration tells,
``phases`` the progress of a configuration. Every room of the worker imports it; it imports none of them.
"""
