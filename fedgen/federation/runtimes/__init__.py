"""Runtimes: in process, on Ray, in Flower's simulation engine."""
