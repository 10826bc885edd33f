"""How much memory of tensors an object holds, whatever it calls them."""

from __future__ import annotations

import gc
from types import FunctionType, MethodType, ModuleType

from torch import Tensor, nn

_OF_ALL = (type, ModuleType, FunctionType, MethodType, nn.Module)


def held_bytes(holder: object) -> int:
    """Return the bytes of all storages that an object reaches, each once and as a whole."""
    storages: dict[int, int] = {}
    known, left = set(), [holder]
    while left:
        each = left.pop()
        if id(each) in known or isinstance(each, _OF_ALL):
            continue
        known.add(id(each))
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        else:
            left.extend(gc.get_referents(each))
    return sum(storages.values())
