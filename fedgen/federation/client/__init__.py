"""Client side of a federation: the ClientApp, its context and its state."""
