"""Hydra configuration groups."""
