"""Which products of a model compute with whole numbers, and the change to them.

A decoder has proved before, with dequantised weights, that it gives the library's logits: rounding
would hide an error.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline_engine.terms.backend import INT4, INT8
from paceline_engine.torch_backend.grouped_linear import GroupProduct, refuse_int4, takes_groups
from paceline_engine.torch_backend.int4_linear import Int4Product, rows_are_alone, takes_int4
from paceline_engine.torch_backend.int8_linear import (
    Int8Product,
    check_exact,
    has_vnni,
    refuse_int8,
)
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.packed_linear import (
    PlainProduct,
    can_pack,
    leave_files,
    product_of,
    take_weights,
    warm_up,
)
from paceline_engine.torch_backend.stored_weights import Grid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline_engine.model_files.quantisation import Quantisation
    from paceline_engine.torch_backend.decoders import Decoder
    from paceline_engine.torch_backend.packed_linear import MakeProduct, Product

_log = logging.getLogger(__name__)

W8A8, W4A16 = "w8a8", "w4a16"
"""Products as the model's files have them: of eight bits, or of four with rows in bfloat16."""


def refuse_weights(kind: str, *, dtype: str, device: torch.device, compiled: bool) -> None:
    """Refuse INT8 and INT4 where they cannot be computed; the products are proved later.

    Args:
        compiled: Whether code may be compiled.

    Raises:
        ModelLoadError: this device, dtype, processor or installation has no such products.
    """
    if kind == INT8:
        refuse_int8(dtype=dtype, device=device)
    elif kind == INT4:
        refuse_int4(dtype=dtype, device=device, compiled=compiled)


def products_of(
    name: str, model: nn.Module, how: Quantisation | None, *, dtype: str, device: torch.device
) -> str:
    """Choose how a quantised model is computed, and tell it in a line of the log.

    Args:
        name: The model's.
        how: How its files have it; None: not quantised.

    Returns:
        W8A8, W4A16, or the dtype: it is computed as any other.
    """
    if how is None:
        _forget_grids(model)
        return dtype
    grids = [(grid, each.weight.shape) for each in _linears(model) if (grid := _grid_of([each]))]
    is_here = device.type == "cpu" and bool(grids)
    eight, four = (sum(grid.bits == bits for grid, _ in grids) for bits in (8, 4))
    if is_here and how.rounds_rows and eight and dtype == "float32" and has_vnni():
        _log.info("model %r: %d of its weights are computed in eight bits", name, eight)
        return W8A8
    if is_here and dtype == "bfloat16" and _has_int4(model):
        _log.info("model %r: %d of its weights are computed in four bits", name, four)
        return W4A16
    hint = ""
    if four and device.type == "cpu" and dtype == "float32":
        hint = "; with --dtype bfloat16 weights in four bits stay so"
    _log.info("model %r: its weights of %s are dequantised to %s%s", name, how.method, dtype, hint)
    _forget_grids(model)
    return dtype


@torch.inference_mode()
def _has_int4(model: nn.Module) -> bool:
    """Whether the kernel takes some weights in four bits, and computes each row by itself."""
    found = {
        linear.weight.shape: Int4Product(linear.weight, None, grid)
        for linear in _linears(model)
        if (grid := _grid_of([linear])) and takes_int4(grid, linear.weight.shape)
    }
    return bool(found) and rows_are_alone(found.values())


@torch.inference_mode()
def replace_products(
    model: Any, decoder: Decoder | None, *, kind: str
) -> tuple[list[Product], Mapping[torch.Size, Int8Product]]:
    """Let a model, and what was chosen to compute it, compute with whole numbers.

    Args:
        kind: INT8 or INT4: all products, rounded where the files did not round them; W8A8 or
            W4A16: those of the files.

    Returns:
        All of the model's products, and those of `check_exact`.

    Raises:
        ModelLoadError: They would not be exact.
    """
    make: MakeProduct = _as_stored
    if kind == INT8:
        make = _in_eight_bits
    elif kind == INT4:
        has_grids = any(_grid_of([each]) is not None for each in _linears(model))
        make = partial(_in_groups, head=model.get_output_embeddings(), has_grids=has_grids)
    if isinstance(decoder, FusedLlama):
        products = decoder.replace_products(model, make)
    else:
        products = _replace_modules(model, make)
    large = check_exact(products)
    warm_up(each for each in products if not isinstance(each, Int8Product))
    _forget_grids(model)
    return products, large


def _in_eight_bits(product: Product, linears: Sequence[nn.Linear]) -> Product:
    grid = _grid_of(linears)
    return Int8Product(product.weight(), product.bias, _scales_of_outputs(grid))


def _scales_of_outputs(grid: Grid | None) -> Tensor | None:
    """Return the scales of eight bits, (O, 1), if each output has one scale."""
    is_such = grid is not None and grid.bits == 8 and grid.scales.shape[1] == 1
    return grid.scales if grid is not None and is_such else None


def _in_groups(
    product: Product, linears: Sequence[nn.Linear], *, head: nn.Module | None, has_grids: bool
) -> Product:
    """Return a product in four bits, or in eight where the model needs more.

    Weights that the file has in groups keep its numbers. Of the others the head gets eight bits,
    and all do if the file has groups: it has these weights in more bits for a reason.
    """
    weight, grid = product.weight(), _grid_of(linears)
    if not takes_groups(weight.shape):
        return _in_eight_bits(product, linears)
    if grid is not None and not takes_groups(weight.shape, grid):
        grid = None
    bits = 8 if has_grids or head in linears else 4
    return GroupProduct(weight, product.bias, grid, bits=bits)


def _as_stored(product: Product, linears: Sequence[nn.Linear]) -> Product:
    """Return a product as the files have its weight, packed if they do not have whole numbers."""
    weight, grid = product.weight(), _grid_of(linears)
    scales = _scales_of_outputs(grid)
    if scales is not None and weight.dtype == torch.float32:
        return Int8Product(weight, product.bias, scales)
    if grid is not None and weight.dtype == torch.bfloat16 and takes_int4(grid, weight.shape):
        return Int4Product(weight, product.bias, grid)
    return product_of(weight, product.bias, packs=can_pack([weight]))


def _replace_modules(model: nn.Module, make: MakeProduct) -> list[Product]:
    """Let a model's linear modules compute with other products, which alone hold the weights."""
    leave_files(model)
    products = []
    for linear in _linears(model):
        bias = None if linear.bias is None else linear.bias.detach()
        product = make(PlainProduct(linear.weight.detach(), bias), [linear])
        linear.forward = product.of_any_rows  # type: ignore[assignment, method-assign]
        take_weights(product, [linear])
        products.append(product)
    return products


def _forget_grids(model: nn.Module) -> None:
    """Give back the memory of grids: of groups of 32 they are half as large as four bits."""
    for each in _linears(model):
        vars(each).pop("grid", None)


def _linears(model: nn.Module) -> list[nn.Linear]:
    return [each for each in model.modules() if type(each) is nn.Linear]


def _grid_of(linears: Sequence[nn.Linear]) -> Grid | None:
    """Return the grid of modules' weights, side by side, if they have one."""
    grids = [grid for each in linears if isinstance(grid := getattr(each, "grid", None), Grid)]
    return Grid.stacked(grids) if len(grids) == len(linears) else None
