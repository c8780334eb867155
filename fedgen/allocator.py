"""How the C library keeps memory that was freed."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_KEPT = 2**30  # bytes


def keep_freed_memory() -> None:
    """Lets this process keep up to 1 GB that it freed. By default a large tensor's pages go back to
    the system, and are faulted in and zeroed again for the next one: where sums over many rows are
    made part by part, that took as long as the sums. For processes of fedgen's own; elsewhere than
    in glibc it does nothing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
        mallopt(option, _KEPT)
