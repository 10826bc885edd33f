"""What this process has taken from the C library's allocator, and not given back."""

from __future__ import annotations

import ctypes
import gc

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
