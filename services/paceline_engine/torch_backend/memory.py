"""How much memory is free where a model computes."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# An accelerator belongs to the model alone; a machine's memory is shared with other programs.
_ACCELERATOR_SHARE = 0.8
_MACHINE_SHARE = 0.5
# Kept tokens have a part of the memory, because other servers may count on the same memory.
_KEPT_SHARE = 0.25

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The free memory of a device, and the parts of it, in [0, 1], to count on.

    Attributes:
        byte_count: The free bytes.
        usable_share: The part of them for sessions.
        kept_share: The part of the sessions' memory for sequences of ended sessions.
    """

    byte_count: int
    usable_share: float
    kept_share: float = 1.0


def free_memory(device: torch.device) -> FreeMemory:
    """Measure the free memory of a device; without memory of its own it uses the machine's."""
    accelerator = torch.get_device_module(device)
    if not hasattr(accelerator, "mem_get_info"):
        return FreeMemory(free_machine_bytes(), _MACHINE_SHARE, _KEPT_SHARE)
    free_bytes, _ = accelerator.mem_get_info(device)
    # Memory that torch keeps for its next allocations is free, too.
    kept = accelerator.memory_reserved(device) - accelerator.memory_allocated(device)
    return FreeMemory(free_bytes + kept, _ACCELERATOR_SHARE)


def free_machine_bytes(*, cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Measure how much of the machine's memory this process can still get.

    Args:
        cgroups: Where cgroups (version 2) are mounted; a container's limit is there.
        membership: The file that names this process's own.
    """
    return min([psutil.virtual_memory().available, *_cgroup_bytes(cgroups, membership)])


def return_freed_memory() -> None:
    """Give freed memory back to the machine, if the C library can: it keeps it for later use.

    Worth it where much was freed for good, as weights in another form.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _cgroup_bytes(cgroups: Path, membership: Path) -> Iterator[int]:
    """Yield the memory that is left in each cgroup that this process is in."""
    own = _read(membership).partition("0::/")[2].partition("\n")[0]
    for group in (cgroups / own, *(cgroups / own).parents):
        limit, used = _read(group / "memory.max"), _read(group / "memory.current")
        if limit.isdecimal() and used.isdecimal():
            yield max(0, int(limit) - int(used) + _reclaimable_bytes(group))
        if group == cgroups:
            return


def _reclaimable_bytes(group: Path) -> int:
    """Return how much of a cgroup's use are files that were only read, such as weights."""
    counts = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    return int(counts.get("inactive_file", 0))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
