"""Freed memory is kept, so that its pages are not faulted in again."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from fedgen.allocator import keep_freed_memory
{}
for _ in range(30):
    torch.ones(20_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_pages_are_faulted_in_once() -> None:
    output = [
        int(subprocess.run([sys.executable, "-c", FAULTS.format(call)], capture_output=True).stdout)
        for call in ("", "keep_freed_memory()")
    ]
    pages = 20_000_000 * 4 / resource.getpagesize()
    assert output[0] - output[1] > 15 * pages
