"""Deployments: a SuperLink, a node at each site, and the coordinator of a run."""
