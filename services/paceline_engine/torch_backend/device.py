"""The device that a model is on: whether it is there, its hardware, and its errors."""

from __future__ import annotations

import hashlib
import os
import platform
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.errors import OverloadedError
from paceline_contract.calls import Hardware
from paceline_engine.terms.backend import DeviceLostError, ModelLoadError, first_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

_KINDS = frozenset({"cpu", "cuda"})
_KINDS_IN_WORDS = "models are computed on cpu, cuda, cuda:1, ..."
# The words of torch, CUDA and its libraries for a lack of memory.
_NO_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
# Linux has the same id in all containers of a machine, and a new one at each boot.
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def usable_device(name: str, *, dtype: str = "float32") -> torch.device:
    """Check that a device is there, and leave out its kernels that are made for fixed lengths.

    Args:
        name: The device's name for torch.
        dtype: The dtype to compute in.

    Raises:
        ModelLoadError: it is not there, is none that models are computed on, or does not know the
            dtype.
    """
    device = _named_device(name)
    try:
        torch.empty(1, device=device)
        # It plans for each length of a sequence, and keeps all plans (pytorch pull request 190388).
        torch.backends.cuda.enable_cudnn_sdp(False)
    except (AssertionError, RuntimeError) as error:
        reason = first_line(error)
        raise ModelLoadError(f"device {name!r} cannot be used here ({reason})") from error
    try:
        ones = torch.ones((2, 2), dtype=getattr(torch, dtype), device=device)
        float((ones @ ones).sum())
    except (AttributeError, RuntimeError, TypeError) as error:
        raise ModelLoadError(f"dtype {dtype!r} cannot be computed on device {name!r}") from error
    return device


def _named_device(name: str) -> torch.device:
    """Find a device of a kind on which models can be computed."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelLoadError(f"device {name!r} is none: {_KINDS_IN_WORDS}") from None
    if device.type not in _KINDS:
        raise ModelLoadError(f"device {name!r} cannot be used here: {_KINDS_IN_WORDS}")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not count:
            raise ModelLoadError(f"device {name!r} cannot be used here: this torch finds no GPU")
        if (device.index or 0) >= count:
            raise ModelLoadError(
                f"device {name!r} cannot be used here: the last one is cuda:{count - 1}"
            )
    return device


@contextmanager
def on_device() -> Iterator[None]:
    """Compute without gradients, and turn the device's errors into ours.

    A device reports late: at the next wait for it, which may be well after the forward.
    """
    try:
        with torch.inference_mode():
            yield
    except torch.OutOfMemoryError as error:
        raise OverloadedError("the device has no memory left", retry_after_seconds=1) from error
    except RuntimeError as error:
        if lacks_memory(error):
            raise OverloadedError("there is no memory left", retry_after_seconds=1) from error
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
            raise DeviceLostError(str(error)) from error
        raise


def lacks_memory(error: RuntimeError) -> bool:
    """Whether an error is a lack of memory, after which the device still works."""
    return any(words in str(error) for words in _NO_MEMORY)


def wait_for(device: torch.device) -> None:
    """Wait for a forward of which nothing is read: an accelerator has only begun it."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()


def hardware_of(device: torch.device, *, threads: int) -> Hardware:
    """Return the name of a device's hardware, and the part of it that a forward keeps busy.

    A CPU is the set of cores that this process may use: processes with sets of their own share
    none. (Sets that overlap in part count as apart.)

    Args:
        device: The device that torch computes on.
        threads: The threads of a forward on a CPU.
    """
    if device.type == "cpu":
        cores = _usable_cores()
        machine = f"{_machine()} {sorted(cores)}"
        return Hardware(_hidden(machine), min(1.0, threads / len(cores)))
    properties = torch.get_device_module(device).get_device_properties(device)
    unique = getattr(properties, "uuid", None)  # of CUDA, also of a part of a divided GPU
    return Hardware(_hidden(str(unique) if unique else f"{_machine()} {device}"), 1.0)


def _machine() -> str:
    return _BOOT.read_text().strip() if _BOOT.exists() else platform.node()


def _usable_cores() -> AbstractSet[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _hidden(identity: str) -> str:
    """Return a hash of a name, which shows equality and nothing else."""
    return hashlib.sha256(identity.encode()).hexdigest()[:32]
