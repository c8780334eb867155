"""Choose the device of a run."""

from __future__ import annotations

import os

import torch

from fedgen.errors import FedgenError


def resolve_device(name: str) -> str:
    """Return the device; ``auto`` is CUDA if available."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise FedgenError("device", "cuda is not available on this machine", "set device=cpu")
        _set_deterministic()
    return name


def _set_deterministic() -> None:
    """Use deterministic CUDA kernels, so that a seeded run repeats bit for bit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (no stubs)
