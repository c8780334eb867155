"""Whole runs, composed from a resolved configuration."""
