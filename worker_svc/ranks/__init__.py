"""Ranks: the split of a model between a replica's processes, and their communication.

`layout` is a rank's part of the model. `group` joins the ranks of a replica and carries bytes and
hidden states between them, and `operators` defines the models' collectives. A process joins a single group
in its life: after the loss of another rank it ends, and its supervisor starts it again. The rooms above
import this one; it imports `protos` only.
"""
