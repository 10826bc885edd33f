"""Models of many families: rows of several texts in one forward give the library's own tokens.

The reference is the library's `generate`, one text at a time, on a copy of the model that nothing
of ours has touched.
"""

from __future__ import annotations

import random
from array import array

import pytest

from paceline_engine.terms.backend import ForwardInterrupted, ModelLoadError
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Draft, Item, Judge
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.families import FAMILIES, ORIGINAL_LENGTH, VOCABULARY_SIZE, build_family
from support.library_texts import Reference, prompts, texts_of
from support.trees import random_tree
from unit.engine.conftest import NEVER, StopAtLayer, chain, path

SPEC = SessionSpec(128)
NEW_TOKENS = 24
# Shorter and longer than the windows; the last one passes the window of the second while decoding.
PROMPT_LENGTHS = (3, 33, 12)
# Across the edges of tiles, with rows that are closed; with rows in the first tile only.
TILED_LENGTHS = (3, 187, 121)
# So short that no text gets to where rotations change.
SHORT_LENGTHS = (3, 17, 12)
LAYERS = 2
# An encoder with a decoder; a library's model that does not give its state back.
REFUSED = ("t5", "recurrent gemma")
# Their state cannot be taken back; at the first two the library is wrong for blocks of rows.
STEPPED = ("mamba", "jamba", "rwkv")
# Their state is kept with open rows.
TILED = (
    "qwen3-next", "qwen3.5", "olmo hybrid", "mamba 2", "falcon-h1", "granite 4 hybrid",
    "granite 4 dense", "bamba", "nemotron-h", "lfm2",
)  # fmt: skip
LONG = (
    "qwen3-next", "olmo hybrid", "granite 4 hybrid", "granite 4 dense", "bamba", "nemotron-h",
    "jamba",
)  # fmt: skip
# These attend in a way of their own; or a token's rotation depends on how long its text is.
CHANGING = ("dynamic", "longrope")
ALONE = ("bloom", "falcon", "falcon with alibi", "gpt-j", "mpt", *CHANGING, *STEPPED)
SERVED = [name for name in FAMILIES if name not in REFUSED]
SHARING = [name for name in SERVED if name not in ALONE]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Where a family's model is; it is made when it is first asked for."""
    made = {}

    def directory(name):
        if name not in made:
            made[name] = build_family(name, tmp_path_factory.mktemp("family") / name)
        return made[name]

    return directory


@pytest.fixture(scope="module")
def backends(directories):
    """Our model of a family; it is loaded when it is first asked for."""
    made = {}

    def backend(name):
        if name not in made:
            made[name] = TransformersBackend(str(directories(name)))
        return made[name]

    return backend


class Decoding:
    """Texts that are decoded together, in forwards as chance has it."""

    def __init__(self, backend, reference: Reference, *, seed: int) -> None:
        self.backend, self.reference = backend, reference
        self.chance = random.Random(seed)
        self.caches = [backend.new_cache(SPEC) for _ in reference.prompts]
        self.done = [0] * len(self.caches)
        self.met: set[str] = set()

    def run(self) -> None:
        while min(self.done) < NEW_TOKENS:
            left = [n for n, done in enumerate(self.done) if done < NEW_TOKENS]
            group = self.chance.sample(left, self.chance.randint(1, len(left)))
            items = [self.item(n) for n in group]
            needed = [each.row_count() for each in items]
            limit = self.chance.choice([None, sum(needed[:-1]) + self.chance.randint(1, 9)])
            if self.chance.random() < 0.2:
                self.interrupt(items, limit)
            for n, each, answer in zip(
                group, items, self.backend.run(items, NEVER, row_limit=limit), strict=True
            ):
                self.take(n, each, answer)
            self.met.add("shared" if len(group) > 1 else "alone")

    def item(self, n: int) -> Item:
        done, text = self.done[n], self.reference.texts[n]
        prefix = array("I", self.reference.prompts[n] + text[:done])
        if self.chance.random() < 0.4:
            return Item(self.caches[n], SPEC, prefix=prefix, task=Draft())
        right = text[done : done + self.chance.randint(0, 5)]
        if self.backend.description.takes_trees and self.chance.random() < 0.5:
            right = right[: NEW_TOKENS - 1 - done]
            tree = random_tree(self.chance, right, size=9, vocabulary_size=VOCABULARY_SIZE)
            return Item(self.caches[n], SPEC, prefix=prefix, task=Judge(tree))
        wrong = [(text[0] + 1) % VOCABULARY_SIZE] * self.chance.randint(0, 3)
        block = (right + wrong)[: NEW_TOKENS - 1 - done]
        return Item(self.caches[n], SPEC, prefix=prefix, task=Judge(chain(block)))

    def interrupt(self, items, limit) -> None:
        with pytest.raises(ForwardInterrupted):
            self.backend.run(items, StopAtLayer(self.chance.randrange(LAYERS)), row_limit=limit)
        self.met.add("interrupted")

    def take(self, n: int, item: Item, answer) -> None:
        if not answer.is_whole:
            self.met.add("part")
            return
        if answer.judgement is None:
            found = answer.drafted.token_ids
        else:
            proposal, accepted = item.task.proposal, answer.judgement.accepted_path
            found = (*proposal.along(accepted), answer.judgement.next_token)
            if proposal.parents:
                self.met.add("tree" if accepted == path(len(accepted)) else "branch")
            else:
                self.met.add("block" if len(accepted) == len(proposal) else "rejection")
        start = self.done[n]
        if start + len(found) > NEW_TOKENS:
            # A wrong token that happened to be right at the text's end.
            found = found[: NEW_TOKENS - start]
        assert list(found) == self.reference.texts[n][start : start + len(found)], (n, start)
        self.done[n] += len(found)


def test_the_list_is_of_families_that_are_served():
    assert set(REFUSED) | set(ALONE) | set(SHARING) == set(FAMILIES)
    assert len(SHARING) == 30


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in SERVED],
)
def test_texts_decoded_together_are_the_librarys_own(name, directories, backends, monkeypatch):
    backend = backends(name)
    assert (backend.decoder is not None, backend.description.shares_forwards) == (
        name in SHARING or name in CHANGING,
        name in SHARING,
    )
    assert backend.description.layer_count == LAYERS
    changes = name in CHANGING
    lengths = TILED_LENGTHS if name in TILED else SHORT_LENGTHS if changes else PROMPT_LENGTHS
    reference = texts_of(directories(name), lengths, count=NEW_TOKENS)
    met = set()
    for seed in range(2 if name in (*TILED, *STEPPED) else 3):
        # As on a CPU, and with one kernel for all texts, as on an accelerator.
        monkeypatch.setattr(backend, "together", seed % 2 == 1)
        decoding = Decoding(backend, reference, seed=seed)
        decoding.run()
        met |= decoding.met
    assert backend.description.takes_trees == (name in SHARING)
    trees = {"tree", "branch"} if name in SHARING else set()
    parts = set() if changes or name in STEPPED[:2] else {"part"}
    assert met == {"shared", "alone", "block", "rejection", "interrupted"} | parts | trees


@pytest.mark.parametrize("name", CHANGING)
def test_where_rotations_change_neither_other_texts_nor_parts_have_a_say(
    name, directories, backends
):
    backend = backends(name)
    # Beyond that length what is right depends on how many rows a forward has: here on one.
    reference = texts_of(directories(name), (3, ORIGINAL_LENGTH + 12, 12), count=NEW_TOKENS)
    items = [
        Item(backend.new_cache(SPEC), SPEC, prefix=array("I", prompt), task=Draft(NEW_TOKENS))
        for prompt in reference.prompts
    ]
    for _ in range(NEW_TOKENS):
        order = [items[n] for n in (2, 0, 1)]
        for each, answer in zip(order, backend.run(order, NEVER, row_limit=20), strict=True):
            each.take(answer)
    for item, prompt, text in zip(items, reference.prompts, reference.texts, strict=True):
        assert item.prefix.tolist() == prompt + text


@pytest.mark.parametrize("name", SERVED)
def test_texts_share_a_forward_where_the_model_can(name, backends):
    backend = backends(name)
    items = [
        Item(backend.new_cache(SPEC), SPEC, prefix=array("I", prompt), task=Draft())
        for prompt in prompts(PROMPT_LENGTHS)
    ]
    before = backend.layers_run
    backend.run(items, NEVER)
    # In a text of its own a row that comes again with each block stands alone: see `SteppedText`.
    alone = len(items) + (2 if name in STEPPED else 0)
    assert backend.layers_run - before == LAYERS * (1 if name in SHARING else alone)


@pytest.mark.parametrize("name", TILED)
def test_rows_are_kept_beside_a_state_in_half_precision_too(name, directories):
    backend = TransformersBackend(str(directories(name)), dtype="bfloat16")
    assert backend.description.shares_forwards
    assert backend.description.takes_trees


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_in_a_line(name, directories):
    with pytest.raises(ModelLoadError, match=name) as caught:
        TransformersBackend(str(directories(name)))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
