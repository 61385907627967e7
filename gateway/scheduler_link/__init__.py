"""The connection to the scheduler."""
