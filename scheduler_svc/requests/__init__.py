"""Requests: their state, their sampling parameters, and their admission."""
