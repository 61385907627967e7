"""Simulation: the production scheduler on a virtual clock.

Engine, replicas, policies and KV memory are those that serve. Only the workers are replaced, by a model of
their step times. `triptych simulate` and the tests of policies run it.
"""
