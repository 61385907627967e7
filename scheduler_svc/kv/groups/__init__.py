"""KV group managers: how the layers of one group use blocks, one file a kind, behind one interface."""
