"""Pooling models: the engine, the scheduler of one replica, and static batches."""
