"""Losses, each as its paper writes it."""
