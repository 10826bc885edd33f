"""Models that are computed in each way, and what they draft in the test's own thread."""

from __future__ import annotations

import random
import threading
from array import array
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoModelForCausalLM

from paceline_contract.proposal import Proposal
from paceline_contract.sampling import SamplingParameters
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.backend import ForwardInterrupted
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Draft, Item, Judge
from paceline_engine.torch_backend.adapters.card import AdapterCard
from paceline_engine.torch_backend.adapters.files import load_adapter
from paceline_engine.torch_backend.cuda_graphs import CapturedForwards
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.transformers import TransformersBackend
from support import kernels_on_cpu
from support.device import DEVICE
from support.trees import random_tree
from unit.engine.conftest import NEVER, continuation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from paceline_engine.terms.backend import Backend, Interrupt
    from paceline_engine.terms.items import Judgement, Outcome
    from paceline_engine.terms.model_cache import ModelCache


def loaded(folder: Path, way: str, **settings: object) -> TransformersBackend:
    """Load a model that is computed in some way, which is told in words.

    `library` instead of fused layers; `one by one`: no forward is shared; `together`: one kernel
    attends to all sequences, as on a GPU; `invariant`; `captured`: forwards are recorded.
    """
    module = "paceline_engine.torch_backend"
    is_captured = way == "captured"
    with pytest.MonkeyPatch.context() as patch:
        if "library" in way:
            patch.setattr(f"{module}.decoders.can_fuse", lambda _: False)
        if "one by one" in way:
            patch.setattr(f"{module}.computed_model.rotations_change", lambda _: True)
        backend = TransformersBackend(
            str(folder),
            invariant=way == "invariant",
            capture=is_captured and DEVICE != "cpu",
            **settings,  # type: ignore[arg-type]
        )
    backend.together = "together" in way
    if is_captured and DEVICE == "cpu":
        backend.captured = CapturedForwards(
            backend.decoder, backend._slabs.shape, kernels_on_cpu, beside=backend.features
        )
    return backend


def drafting(folder: Path, way: str, adapter: Path, **settings: object) -> TransformersBackend:
    """Load a Llama that drafts for itself; see `loaded` for the way."""
    backend = loaded(folder, way, adapter=str(adapter), **settings)
    assert isinstance(backend.decoder, FusedLlama) == (way != "library")
    return backend


def reference(folder: Path, adapter: Path, *, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the library's model and an adapter's module, which compute without our engine."""
    model = AutoModelForCausalLM.from_pretrained(folder).to(dtype).eval()
    fingerprint = AdapterCard.read(adapter).fingerprint
    return model, load_adapter(adapter, model=model, fingerprint=fingerprint).module


def specs(reserve_length: int = 200) -> list[SessionSpec]:
    """A greedy session, and two that sample: from a nucleus, and from the 20 likeliest tokens."""
    return [
        SessionSpec(reserve_length),
        SessionSpec(reserve_length, SamplingParameters(0.8, top_p=0.9), seed=3),
        SessionSpec(reserve_length, SamplingParameters(1.2, top_k=20), seed=8),
    ]


def draft(
    backend: Backend,
    spec: SessionSpec,
    prefix: Sequence[int],
    count: int,
    *,
    cache: ModelCache | None = None,
    interrupt: Interrupt = NEVER,
):
    """Draft step by step; return the tokens and their distributions."""
    cache = cache or backend.new_cache(spec)
    item = Item(cache, spec, prefix=array("I", prefix), task=Draft(count))
    tokens, distributions, is_done = [], [], False
    while not is_done:
        (outcome,) = backend.run([item], interrupt)
        if isinstance(outcome, Exception):
            raise outcome
        tokens += outcome.chain
        distributions += outcome.drafted.distributions
        is_done = item.take(outcome)
    return tokens, distributions


def draft_together(backend: Backend, items: list[Item]) -> list[list[int]]:
    """Draft in shared forwards until all are done; return prefixes and what follows them."""
    left = items
    while left:
        outcomes = backend.run(left, NEVER)
        left = [it for it, outcome in zip(left, outcomes, strict=True) if not it.take(outcome)]
    return [item.prefix.tolist() for item in items]


def decode_by_proposals(
    text: ModelText, prompt: list[int], *, count: int
) -> tuple[list[int], list[Judgement]]:
    """Decode by the model's own proposals; return the tokens, and what each forward judged."""
    made, judgements, forwards = [], [], text.decode(prompt, guesses=True)
    while len(made) < count:
        decided, judged = next(forwards)
        made += decided
        judgements.append(judged)
    return made, judgements


def mixed_judgements(backend: Backend, prompt: Sequence[int], *, count: int) -> list[Item]:
    """Make so many judgements of trees by chance, every third without guesses, and a draft."""
    chance, kinds, made = random.Random(5), specs(), []
    for n in range(count):
        tree = random_tree(chance, (), size=1 + n, vocabulary_size=300)
        prefix, task = array("I", [7 + n, *range(3 * n)]), Judge(tree, propose=n % 3 != 2)
        spec = kinds[n % 3]
        made.append(Item(backend.new_cache(spec), spec, prefix=prefix, task=task))
    cache = backend.new_cache(kinds[0])
    return [*made, Item(cache, kinds[0], prefix=array("I", prompt), task=Draft())]


def check_as_alone(backend: Backend, items: Callable[[], list[Item]]) -> list[Outcome]:
    """Check that items get in one forward what each gets alone; return what they got."""
    together = backend.run(items(), NEVER)
    alone = [backend.run([item], NEVER)[0] for item in items()]
    assert [it.judgement for it in together] == [it.judgement for it in alone]
    assert [it.dropped_count for it in together] == [it.dropped_count for it in alone]
    return together


def check_guesses(
    backend: Backend,
    spec: SessionSpec,
    prompt: list[int],
    expected: Callable[[list[int], int], Proposal],
) -> None:
    """Check what is proposed after verdicts on trees and chains, of which a part is right.

    Args:
        expected: Returns what is to be proposed after a text and the next token.
    """
    chance = random.Random(spec.seed)
    text = continuation(ModelText(backend, spec), prompt, 24)
    served, done = ModelText(backend, spec), 0
    while done < 12:
        right = text[done : done + chance.randint(0, 4)]
        tree = random_tree(chance, right, size=9, vocabulary_size=300)
        given = tree if chance.random() < 0.5 else Proposal((*right, 7, 8))
        judged = served.judge(
            [*prompt, *text[:done]], given.token_ids, parents=given.parents, propose=True
        )
        accepted = given.along(judged.accepted_path)
        assert [*accepted, judged.next_token] == text[done : done + len(accepted) + 1]
        assert judged.proposal == expected([*prompt, *text[:done], *accepted], judged.next_token)
        done += len(accepted) + 1


def check_any_past(
    backend: Backend, spec: SessionSpec, expected: Callable[[list[int], int], Proposal] | None
) -> None:
    """Check that cuts, other texts, drafts, trees, interrupts and other calls leave no trace.

    Args:
        expected: Returns what is to be proposed after a text and the next token; None: guesses are
            not compared.
    """
    chance, compared = random.Random(11), 0
    for _ in range(3):
        text, prefix = ModelText(backend, spec), [5, 6, 7]
        for _ in range(40):
            prefix = prefix[: chance.randint(1, len(prefix))]
            prefix += [chance.choice([5, 6, 7]) for _ in range(chance.randint(0, 4))]
            what = chance.random()
            if what < 0.2:
                text.interrupt = threading.Event()
                text.interrupt.set()
                with pytest.raises(ForwardInterrupted):
                    text.judge(prefix, [7, 7], propose=True)
                text.interrupt = threading.Event()
            elif what < 0.3:
                text.draft_chain(prefix, count=2)
            elif what < 0.4:
                text.rank(prefix, width=3)
            else:
                tree = random_tree(chance, [5, 6], size=5, vocabulary_size=300)
                judged = text.judge(
                    prefix, tree.token_ids, parents=tree.parents, propose=what > 0.6
                )
                if what > 0.6 and expected is not None:
                    after = [*prefix, *tree.along(judged.accepted_path)]
                    assert judged.proposal == expected(after, judged.next_token)
                    compared += 1
    assert compared > 30 or expected is None


def check_kept_beginning(
    backend: Backend, spec: SessionSpec, expected: Callable[[list[int], int], Proposal]
) -> None:
    """Check the guesses in a text that begins as a kept one, whose rows it copies."""
    kept = ModelText(backend, spec)
    for length in (3, 9):  # the head's own keys and values are there for a part
        kept.judge([*range(5, 5 + length)], [7, 7], propose=length == 3)
    kept.cache.end()
    for prefix in ([*range(5, 14)], [5, 6, 7, 8, 60, 61]):
        text = ModelText(backend, spec)
        text.cache.begin_like(kept.cache)
        judged = text.judge(prefix, propose=True)
        assert text.row_count < len(prefix), "its beginning is copied"
        assert judged.proposal == expected(prefix, judged.next_token)


def check_prompt_in_parts(
    backend: Backend,
    spec: SessionSpec,
    expected: Callable[[list[int], int], Proposal],
    *,
    length: int,
    row_limit: int,
) -> None:
    """Check the guesses after a prompt that takes several forwards."""
    prompt = [5 + n % 40 for n in range(length)]
    task = Judge(Proposal(), propose=True)
    item = Item(backend.new_cache(spec), spec, prefix=array("I", prompt), task=task)
    steps, judgement = 0, None
    while judgement is None:
        (outcome,) = backend.run([item], NEVER, row_limit=row_limit)
        judgement, steps = outcome.judgement, steps + 1
    assert steps == -(-length // row_limit)
    assert judgement.proposal == expected(prompt, judgement.next_token)
