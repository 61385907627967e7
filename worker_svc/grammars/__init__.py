"""Constrained output: grammars compiled in processes of their own, matched per slot, applied to logits. Only this package imports xgrammar.

Imports nothing here: the compiling processes import parts of the package without torch.
"""
