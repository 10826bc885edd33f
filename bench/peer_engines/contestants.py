"""Who takes part: each is a process of its own, with one form of the model."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from peer_engines.environments import LLAMA_VERSION, RUNNERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from peer_engines.environments import Peers

Prepare: TypeAlias = "Callable[[Peers], tuple[Path, dict[str, Any]]]"
"""Makes what a contestant needs; returns its Python and what its job says besides."""


class Group(StrEnum):
    """Whose a contestant is."""

    SERVICES = "Paceline, services"
    ENGINE = "Paceline, engine alone"
    PEER = "peer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """An engine with one form of the model.

    Attributes:
        name: For `--only` and tables.
        form: What its weights and its arithmetic are.
        runner: The program, among the runners.
        ways: Its ways to decode; the first one also has the prompts' first tokens.
        stream_ways: Those that decode several texts at once.
        most_chats: So many chats are enough for it, since it is slow.
    """

    name: str
    group: Group
    form: str
    runner: Path
    prepare: Prepare
    ways: Sequence[str] = ("plain",)
    stream_ways: Sequence[str] = ("plain",)
    most_chats: int | None = None


@dataclass(frozen=True, slots=True)
class _Form:
    """One of Paceline's: how the engine loads it, and how a target is told."""

    name: str
    load_options: dict[str, str | bool] = field(default_factory=dict)
    flags: Sequence[str] = ()


_FORMS = (
    _Form("float32"),
    _Form("bfloat16", {"dtype": "bfloat16"}, ["--dtype=bfloat16"]),
    # Rounded activations turn the last bits of a row into another token every few texts, so what
    # has to be exact has the same bits in every batch.
    _Form("int8", {"weights": "int8", "invariant": True}, ["--weights=int8", "--invariant"]),
    _Form("int4", {"weights": "int4", "invariant": True}, ["--weights=int4", "--invariant"]),
)


def known_contestants() -> tuple[Contestant, ...]:
    """Return all of them."""
    return (*map(_services, _FORMS), *map(_engine, _FORMS), *_LLAMA, *_OPENVINO, *_OTHERS)


def _services(form: _Form) -> Contestant:
    # No server keeps a text of an earlier request.
    flags = ["--keep-seconds=0", *form.flags]
    return Contestant(
        name=f"services-{form.name}",
        group=Group.SERVICES,
        form=form.name,
        runner=RUNNERS / "on_services.py",
        prepare=lambda peers: (Path(sys.executable), {"model": str(peers.gguf), "flags": flags}),
        ways=("plain", "si", "auto"),
        stream_ways=("plain", "auto"),
    )


def _engine(form: _Form) -> Contestant:
    options = {"load_options": form.load_options}
    return Contestant(
        name=f"engine-{form.name}",
        group=Group.ENGINE,
        form=form.name,
        runner=RUNNERS / "on_engine.py",
        prepare=lambda peers: (Path(sys.executable), {"model": str(peers.gguf), **options}),
        ways=("plain", "si"),
    )


def _prepare_llama(peers: Peers, *, form: str) -> tuple[Path, dict[str, Any]]:
    libraries, model = peers.llama_libraries(), peers.llama_model(form)
    job = {"model": str(model), "libraries": str(libraries), "version": LLAMA_VERSION}
    return peers.llama_python(), job


def _prepare_openvino(peers: Peers, *, form: str, precision: str) -> tuple[Path, dict[str, Any]]:
    job = {"model": str(peers.openvino_model(form)), "precision": precision}
    return peers.openvino_python(), job


def _prepare_transformers(peers: Peers) -> tuple[Path, dict[str, Any]]:
    return Path(sys.executable), {"model": str(peers.folder_model()), "format": "float32"}


def _prepare_vllm(peers: Peers) -> tuple[Path, dict[str, Any]]:
    return peers.vllm_python(), {"model": str(peers.folder_model()), "format": "float32"}


_LLAMA = tuple(
    Contestant(
        name=f"llama.cpp-{form}",
        group=Group.PEER,
        form=form,
        runner=RUNNERS / "on_llama.py",
        prepare=partial(_prepare_llama, form=form),
    )
    for form in ("q4_1", "float16", "float32")
)


def _openvino(
    form: str, precision: str, name: str, *, says: str, ways: Sequence[str] = ("plain",)
) -> Contestant:
    return Contestant(
        name=f"openvino-{name}",
        group=Group.PEER,
        form=says,
        runner=RUNNERS / "on_openvino.py",
        prepare=partial(_prepare_openvino, form=form, precision=precision),
        ways=ways,
        stream_ways=[way for way in ways if way == "plain"],
    )


_OPENVINO = (
    _openvino("float32", "f32", "float32", says="float32"),
    # Its own choice of precision, which is bfloat16 where the processor computes it.
    _openvino("float32", "", "default", says="float32, precision by default"),
    _openvino("int8", "f32", "int8", says="int8 weights, float32"),
    _openvino("int8", "f32", "int8-lookup", says="int8 weights, float32", ways=("lookup",)),
)
_OTHERS = (
    Contestant(
        name="transformers-float32",
        group=Group.PEER,
        form="float32",
        runner=RUNNERS / "on_transformers.py",
        prepare=_prepare_transformers,
        most_chats=3,
    ),
    Contestant(
        name="vllm-float32",
        group=Group.PEER,
        form="float32",
        runner=RUNNERS / "on_vllm.py",
        prepare=_prepare_vllm,
    ),
)
