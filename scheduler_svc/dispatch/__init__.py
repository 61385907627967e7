"""All requests and all replicas: the waiting queue, the grammar queue and placement."""
