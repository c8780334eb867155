"""Configure how the C library keeps freed memory."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_KEPT = 2**30  # bytes


def keep_freed_memory() -> None:
    """Let this process keep up to 1 GB of freed memory. By default, the pages of a large tensor are
    returned to the system, and faulted in and zeroed again for the next one: for sums over many
    records in parts, that took as long as the sums. For fedgen's own processes; without glibc, it
    does nothing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
        mallopt(option, _KEPT)
