"""Losses, each as written in its paper."""
