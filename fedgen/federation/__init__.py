"""Flower messages, apps, grids, client state and the round loop."""
