"""Flower server strategies, one per wire pattern."""
