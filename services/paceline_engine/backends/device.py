"""The device that a model is on: whether it is there, and what it reports."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from paceline.errors import OverloadedError
from paceline_engine.backends.base import DeviceLostError, ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["on_device", "usable_device", "wait_for"]


def usable_device(name: str) -> torch.device:
    """Check that a device is there.

    Raises:
        ModelLoadError: it is not.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ModelLoadError(f"device {name!r} cannot be used here ({reason})") from error
    return device


@contextmanager
def on_device() -> Iterator[None]:
    """Compute without gradients, and give what the device reports its type.

    A device reports late: at the next wait for it, which may be well after the forward.
    """
    try:
        with torch.inference_mode():
            yield
    except torch.OutOfMemoryError as error:
        raise OverloadedError("the device has no memory left", retry_after_seconds=1) from error
    except RuntimeError as error:
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
            raise DeviceLostError(str(error)) from error
        if "can't allocate memory" in str(error):
            raise OverloadedError("there is no memory left", retry_after_seconds=1) from error
        raise


def wait_for(device: torch.device) -> None:
    """Let a forward be over: where nothing is read of it, an accelerator has only begun it."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()
