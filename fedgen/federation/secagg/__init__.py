"""Secure aggregation: masks, signatures, the server's exchange."""
