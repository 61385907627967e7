"""Decisions of one replica: slots, plans, steps in flight and outputs."""
