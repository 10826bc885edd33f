"""Which products of a model compute with whole numbers, and the change to them.

A decoder has proved before, with dequantised weights, that it gives the library's logits: rounding
would hide an error.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline_engine.terms.backend import INT4, INT8, ModelLoadError
from paceline_engine.torch_backend.grouped_linear import GROUP, refuse_int4
from paceline_engine.torch_backend.grouped_products import GroupedProducts
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
from paceline_engine.torch_backend.w4a16_linear import W4A16Product, rows_are_alone, takes_w4a16
from paceline_engine.torch_backend.weight_grids import fitting_grid, grid_of, scales_of_outputs

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


def tell_what_is_faster(
    name: str, model: nn.Module, *, dtype: str, device: torch.device, compiled: bool
) -> None:
    """Tell in a line of the log what would be faster on this machine than to compute in `dtype`.

    Args:
        name: The model's.
        compiled: Whether code may be compiled.
    """
    widths = [each.in_features for each in _linears(model)]
    kinds = [
        kind
        for kind, takes in ((INT8, bool(widths)), (INT4, any(it % GROUP == 0 for it in widths)))
        if takes and has_vnni() and not _is_refused(kind, device=device, compiled=compiled)
    ]
    options = []
    if kinds:
        alone = "" if dtype == "float32" else " without --dtype"
        options.append(f"--weights {' or '.join(kinds)}{alone}")
    has_bfloat16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    if device.type == "cpu" and dtype != "bfloat16" and has_bfloat16():
        options.append("--dtype bfloat16")
    if options:
        _log.info(
            "model %r: computed in %s; on this machine %s would be faster and take less memory,"
            " and now and then choose another token",
            name,
            dtype,
            " or ".join(options),
        )


def _is_refused(kind: str, *, device: torch.device, compiled: bool) -> bool:
    try:
        refuse_weights(kind, dtype="float32", device=device, compiled=compiled)
    except ModelLoadError:
        return True
    return False


def products_of(
    name: str, model: nn.Module, how: Quantisation, *, dtype: str, device: torch.device
) -> str:
    """Choose how a quantised model is computed, and tell it in a line of the log.

    Args:
        name: The model's.
        how: How its files have it.

    Returns:
        W8A8, W4A16, or the dtype: it is computed as any other.
    """
    grids = [(grid, each.weight.shape) for each in _linears(model) if (grid := grid_of([each]))]
    is_here = device.type == "cpu" and bool(grids)
    eight = sum(scales_of_outputs(grid) is not None for grid, _ in grids)
    four = sum(takes_w4a16(grid, shape) for grid, shape in grids)
    if is_here and how.rounds_rows and eight and dtype == "float32" and has_vnni():
        _log.info("model %r: %d of its weights are computed in eight bits", name, eight)
        return W8A8
    if is_here and dtype == "bfloat16" and _has_w4a16(model):
        _log.info("model %r: %d of its weights are computed in four bits", name, four)
        return W4A16
    hint = ""
    if four and device.type == "cpu" and dtype == "float32":
        hint = "; with --dtype bfloat16 weights in four bits stay so"
    _log.info("model %r: its weights of %s are dequantised to %s%s", name, how.method, dtype, hint)
    _forget_grids(model)
    return dtype


@torch.inference_mode()
def _has_w4a16(model: nn.Module) -> bool:
    """Whether the kernel takes some weights in four bits, and computes each row by itself."""
    of_shapes = {
        linear.weight.shape: (linear.weight, grid)
        for linear in _linears(model)
        if (grid := grid_of([linear])) and takes_w4a16(grid, linear.weight.shape)
    }
    found = [W4A16Product(weight, None, grid) for weight, grid in of_shapes.values()]
    return bool(found) and rows_are_alone(found)


@torch.inference_mode()
def replace_products(
    name: str,
    model: Any,
    decoder: Decoder | None,
    *,
    kind: str,
    beside: Sequence[nn.Module] = (),
) -> tuple[list[Product], Mapping[torch.Size, Int8Product]]:
    """Let a model, and what was chosen to compute it, compute with whole numbers.

    Args:
        name: The model's, for the log.
        kind: INT8 or INT4: all products, rounded where the files did not round them; W8A8 or
            W4A16: those of the files.
        beside: What drafts beside the model, all of whose products are computed in eight bits
            where the model's are computed with whole numbers and rows in float32.

    Returns:
        All of the products, and those of `check_exact`.

    Raises:
        ModelLoadError: They would not be exact.
    """
    grouped = GroupedProducts(model)
    makers: dict[str, MakeProduct] = {INT8: _in_eight_bits, INT4: grouped.make}
    make = makers.get(kind, _as_stored)
    if isinstance(decoder, FusedLlama):
        products = decoder.replace_products(model, make)
    else:
        products = _replace_modules(model, make)
    if kind == INT8 or (kind != W4A16 and has_vnni()):
        for each in beside:
            products.extend(_replace_modules(each, _in_eight_bits))
    large = check_exact(products)
    warm_up(each for each in products if not isinstance(each, Int8Product))
    _forget_grids(model)
    if kind == INT4:
        grouped.tell(name)
    return products, large


def _in_eight_bits(product: Product, linears: Sequence[nn.Linear]) -> Product:
    weight = product.weight()
    return Int8Product(weight, product.bias, scales_of_outputs(fitting_grid(weight, linears)))


def _as_stored(product: Product, linears: Sequence[nn.Linear]) -> Product:
    """Return a product as the files have its weight, packed if they do not have whole numbers."""
    weight = product.weight()
    grid = fitting_grid(weight, linears)
    scales = scales_of_outputs(grid)
    if scales is not None and weight.dtype == torch.float32:
        return Int8Product(weight, product.bias, scales)
    if grid is not None and weight.dtype == torch.bfloat16 and takes_w4a16(grid, weight.shape):
        return W4A16Product(weight, product.bias, grid)
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
        vars(each).pop("stored_as", None)


def _linears(model: nn.Module) -> list[nn.Linear]:
    return [each for each in model.modules() if type(each) is nn.Linear]
