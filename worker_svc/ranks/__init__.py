"""Ranks: how a replica's processes split a model, and how they talk to one another.

`layout` says which part of the model a rank has. `group` joins the ranks of a replica, `channel` carries
bytes between them, `links` hidden states, and `operators` has the collectives that models call. A process
joins one group in its life: if another rank is lost, it ends, and its supervisor starts it again. The rooms
above import this one; it imports `protos` only.
"""
