"""A drafter and a target with different tokenizers: how they differ, and what to start."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import UnsupportedError
from paceline.v1 import model_service_pb2_grpc
from paceline_engine.model_files.target_tokens import TargetTokens, find_target_tokens
from paceline_engine.model_files.tokenizer_difference import tell_difference
from paceline_engine.speaking.overlap import LEAST_COVER, Overlap, measure_overlap
from paceline_engine.speaking.vocabulary import Vocabulary
from paceline_engine.terms.backend import ModelLoadError
from paceline_orchestrator.fleet.wire import fetch_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    import grpc

    from paceline.v1.model_service_pb2 import GetModelInfoResponse


@dataclass(frozen=True, slots=True)
class Translation:
    """How a drafter can speak a target's vocabulary.

    Attributes:
        difference: How the tokenizers differ.
        overlap: What the drafter has of what the target writes.
        speak: What the drafter is told.
    """

    difference: str
    overlap: Overlap
    speak: str

    def told(self) -> str:
        """Say what differs and what they have in common."""
        return (
            f"The tokenizers differ: {self.difference}.\n"
            f"The drafter has {self.overlap.vocabulary:.0%} of the target's tokens, and"
            f" {self.overlap.cover:.0%} of those that a sample of text and code is made of; from"
            f" {LEAST_COVER:.0%} on it can speak the target's vocabulary."
        )


def translation_of(drafter: TargetTokens, target: TargetTokens) -> Translation | None:
    """Compare two models' tokens; None if they are the same.

    Raises:
        ModelLoadError: The tokens of one cannot be translated.
    """
    if drafter.tokenizer == target.tokenizer and drafter.vocabulary_size == target.vocabulary_size:
        return None
    ours, theirs = (
        Vocabulary(it.tokenizer, size=it.vocabulary_size, end_ids=it.end_ids, name=it.name)
        for it in (drafter, target)
    )
    difference = tell_difference(drafter.tokenizer, target.tokenizer)
    return Translation(difference, measure_overlap(theirs, ours), target.name)


def tokens_in_folder(model: str) -> TargetTokens | None:
    """Read a model's tokenizer; None if it is elsewhere, as at a hub, or cannot be read."""
    try:
        return find_target_tokens(model)
    except ModelLoadError:
        return None


async def tokens_of_server(
    channel: grpc.aio.Channel, info: GetModelInfoResponse, folder: Path
) -> TargetTokens | None:
    """Fetch a running server's tokenizer, and write it down for a drafter to read.

    None if its model has none.

    Args:
        folder: An empty folder.
    """
    stub = model_service_pb2_grpc.ModelServiceStub(channel)
    try:
        content = await fetch_tokenizer(stub, name=info.model_name)
    except UnsupportedError:
        return None
    (folder / "tokenizer.json").write_bytes(content)
    for name, said in (
        ("config.json", {"vocab_size": info.vocabulary_size}),
        ("generation_config.json", {"eos_token_id": [*info.eos_token_ids]}),
    ):
        (folder / name).write_text(json.dumps(said))
    return find_target_tokens(str(folder))
