"""What this process has taken from the C library's allocator, or of the kernel's pages."""

from __future__ import annotations

import ctypes
import gc
import mmap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS.split())


_mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)

KNOWN = _mallinfo2 is not None
"""Whether it can be told: by glibc 2.33 and later."""

if _mallinfo2 is not None:
    _mallinfo2.restype = _Mallinfo


def native_bytes() -> int:
    """Return what is in use, in all arenas; small Python objects have memory of their own."""
    assert _mallinfo2 is not None
    gc.collect()
    found = _mallinfo2()
    return int(found.uordblks + found.hblkhd)


def resident_bytes(tensor: Tensor) -> int:
    """Return how much of a CPU tensor's storage lies in pages that the process has.

    It is counted page by page. A process's own sum also moves with what other threads do, and on
    machines with many processors it is an estimate.
    """
    begin, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
    first, last = begin // mmap.PAGESIZE, (begin + size - 1) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        pages = np.frombuffer(file.read(8 * (last - first + 1)), np.uint64)
    return int((pages >> np.uint64(63)).sum()) * mmap.PAGESIZE
