"""KV memory of one replica: block pools, prefix hashes, copies and events."""
