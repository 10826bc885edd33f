"""A model that waits instead of computing: the experimental method of the DSI paper.

Everything around the forward is real: sessions, queue, gRPC. The target's next token is a
hash of the whole prefix, so a wrong prefix anywhere shows as wrong tokens from there on. A drafter
hashes the same prefix, and answers with the target's token with the given probability. No torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline_contract.byte_level import LETTERS
from paceline_contract.calls import VerificationRule
from paceline_contract.proposal import Proposal, SparseDistribution
from paceline_contract.sampling import FILTERS
from paceline_engine.model_backend import Feed, ModelBackend
from paceline_engine.terms.backend import ForwardInterrupted, Interrupt, ModelLoadError
from paceline_engine.terms.calls import ModelDescription, SessionSpec
from paceline_engine.terms.items import Draft, Item, Judge, Judgement
from paceline_engine.terms.model_cache import ModelCache
from paceline_engine.terms.rank_paths import likeliest_tree, propose, rank_counts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline_engine.terms.draft_tree import Ranked
    from paceline_engine.terms.rank_paths import RankPath

_MASK = 0xFFFFFFFFFFFFFFFF
_BYTE_COUNT = 256
_WAKE_SECONDS = 3e-4
"""How late a wait ends, about. It is asked to end so much earlier, and the rest is spun away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """The simulated model's parameters.

    Attributes:
        ttft_seconds: A session's first forward (time to first token).
        tpot_seconds: Every other forward (time per output token).
        row_seconds: The time that each row of a forward adds after its first row. It does not count
            the rows of sessions' first forwards, which together take at least `ttft_seconds`.
        acceptance_rate: For a drafter, how often it answers with the target's token, in [0, 1].
            1 is the target itself.
        rank_decay: q of a drafter that is wrong: its n-th runner-up is the target's token with
            probability q (1 - q)^(n - 1); in (0, 1]. 0.4 is assumed, not measured.
        vocabulary_size: 2 or more. From 512 on, only readable fill tokens are chosen.
        self_rates: For a target that drafts for itself, how often each of its guesses is right;
            the guess after its own next token comes first. Empty: it does not draft for itself.
        self_nodes: How many guesses it proposes at most.
        context_length: The most tokens a session can hold.
        salt: Models with the same salt and vocabulary continue a sequence alike.
        name: The model's name for people.
    """

    ttft_seconds: float = 0.03
    tpot_seconds: float = 0.03
    row_seconds: float = 0.0
    acceptance_rate: float = 1.0
    vocabulary_size: int = 2048
    context_length: int = 1 << 17
    salt: int = 0
    rank_decay: float = 0.4
    self_rates: tuple[float, ...] = ()
    self_nodes: int = 16
    name: str = "simulated"


class SimulatedBackend(ModelBackend):
    """A simulated drafter or target.

    Raises:
        ModelLoadError: a setting is out of its limits.
    """

    def __init__(self, model: SimulatedModel) -> None:
        if not 0 <= model.acceptance_rate <= 1:
            raise ModelLoadError(f"acceptance_rate {model.acceptance_rate} is not in [0, 1]")
        if not 0 < model.rank_decay <= 1:
            raise ModelLoadError(f"rank_decay {model.rank_decay} is not in (0, 1]")
        if model.vocabulary_size < 2:
            raise ModelLoadError(f"vocabulary_size {model.vocabulary_size} is below 2")
        if min(model.ttft_seconds, model.tpot_seconds, model.row_seconds) < 0:
            raise ModelLoadError("a simulated latency is below 0")
        if not all(0 <= rate <= 1 for rate in model.self_rates):
            raise ModelLoadError(f"self_rates {model.self_rates} are not in [0, 1]")
        self.model = model
        self._paths = self._self_drafts()
        self._widths = rank_counts(self._paths)
        self.tokenizer = simulated_tokenizer(model.vocabulary_size)
        identity = f"{model.vocabulary_size} {model.salt} {model.acceptance_rate}"
        if model.acceptance_rate < 1:
            identity += f" {model.rank_decay}"
        tokenizer = self.tokenizer or f"no tokenizer {model.vocabulary_size}".encode()
        self.description = ModelDescription(
            name=model.name,
            revision="simulated",
            fingerprint=hashlib.sha256(f"simulated {identity}".encode()).hexdigest(),
            tokenizer_fingerprint=hashlib.sha256(tokenizer).hexdigest(),
            vocabulary_size=model.vocabulary_size,
            eos_token_ids=(),
            context_length=model.context_length,
            backend="simulated",
            dtype="none",
            device="none",
            layer_count=0,
            cancels_between_layers=True,
            shares_forwards=True,
            takes_trees=True,
            is_invariant=True,
            # At each position one token is possible, which is what any filter leaves.
            samples_by=FILTERS,
            verification_rules=(VerificationRule.EXACT,),
            self_draft_depth=max(map(len, self._paths), default=0),
            self_draft_kind="simulated" if self._paths else "",
        )

    def new_cache(self, spec: SessionSpec) -> SimulatedCache:
        """Begin an empty sequence for a session."""
        return SimulatedCache(self.model, spec)

    def _forward(self, feeds: Sequence[Feed], interrupt: Interrupt) -> list[Sequence[int]]:
        deadline = time.monotonic() + self._forward_seconds(feeds)
        scores = []
        for feed in feeds:
            assert isinstance(feed.cache, SimulatedCache)
            scores.append(feed.cache.append(feed))
        _wait_until(deadline, interrupt)
        return scores

    def _forward_seconds(self, feeds: Sequence[Feed]) -> float:
        """Return how long a forward takes, by its rows and the sessions that begin."""
        model = self.model
        begun = [feed for feed in feeds if feed.cache.length]
        row_count = sum(len(feed.token_ids) for feed in begun)
        seconds = model.tpot_seconds + max(0, row_count - 1) * model.row_seconds if begun else 0.0
        return seconds if len(begun) == len(feeds) else max(seconds, model.ttft_seconds)

    def _judge(self, scores: Sequence[int], task: Judge, *, item: Item) -> Judgement:
        del item
        path, next_token = task.proposal.follow(lambda row, _: self._target_token(scores[row]))
        # The simulated target is certain: its one token has probability 1.
        logprobs = (0.0,) * (len(path) + 1) if task.logprobs else ()
        judgement = Judgement(path, next_token, logprobs)
        if task.top_logprobs:
            decided = (*task.proposal.along(path), next_token)
            judgement = replace(judgement, top_logprobs=tuple(((it, 0.0),) for it in decided))
        if task.propose:
            guessed = self._propose(scores[path[-1] + 1 if path else 0])
            judgement = replace(judgement, proposal=guessed)
        return judgement

    def _propose(self, prefix_hash: int) -> Proposal:
        """Guess the tokens after the target's next token.

        Whether a guess is right does not depend on other rows' guesses at the same position.
        """
        guesses = []
        for place, width in enumerate(self._widths):
            prefix_hash = _after(prefix_hash, self._target_token(prefix_hash))
            opinion = _mix((prefix_hash ^ _MASK) + place + 1)
            rate = self.model.self_rates[place]
            ranked = self._ranked(prefix_hash, width, rate=rate, opinion=opinion)
            guesses.append([token for token, _ in ranked])
        return propose(self._paths, guesses)

    def _self_drafts(self) -> tuple[RankPath, ...]:
        """Return the tree of the likeliest guesses."""
        ranks = range(min(self.model.self_nodes, self.model.vocabulary_size - 1))
        rates = [[self._share(rank, rate=rate) for rank in ranks] for rate in self.model.self_rates]
        return likeliest_tree(rates, node_count=self.model.self_nodes)

    def _draft(self, scores: Sequence[int], item: Item) -> Proposal:
        token = self._target_token(scores[0])
        opinion = _mix(scores[0] ^ _MASK)
        if opinion >= self.model.acceptance_rate * 2.0**64:
            size = self.model.vocabulary_size
            token = (token + 1 + opinion % (size - 1)) % size
        if item.spec.rule is VerificationRule.REJECTION:  # at temperature 0
            return Proposal((token,), distributions=(SparseDistribution.certain(token),))
        return Proposal((token,))

    def _rank(self, scores: Sequence[int], item: Item) -> list[Ranked]:
        assert isinstance(item.task, Draft)
        rate = self.model.acceptance_rate
        return [
            self._ranked(each, item.task.width, rate=rate, opinion=_mix(each ^ _MASK))
            for each in scores
        ]

    def _ranked(self, prefix_hash: int, count: int, *, rate: float, opinion: int) -> Ranked:
        """Put the target's token at its rank, and other tokens around it.

        It is the first with probability a, else the r-th with q (1 - q)^(r - 2) of the rest.

        Args:
            rate: a.
            opinion: 64 random bits.
        """
        right, size, decay = (
            self._target_token(prefix_hash),
            self.model.vocabulary_size,
            self.model.rank_decay,
        )
        rank = 0
        if opinion >= rate * 2.0**64:
            rank, chance = 1, _mix(opinion) / 2.0**64
            # The number of draws of a coin until it shows heads, with probability q.
            while rank < count and chance >= decay:
                chance = (chance - decay) / (1 - decay)
                rank += 1
        count = min(count, size - 1)
        wrong = ((right + 1 + (opinion + n) % (size - 1)) % size for n in range(count))
        token_ids = [right if place == rank else next(wrong) for place in range(count)]
        shares = [self._share(place, rate=rate) for place in range(count)]
        return list(zip(token_ids, shares, strict=True))

    def _share(self, rank: int, *, rate: float) -> float:
        """Return how often the token at a rank, from 0, is the target's."""
        decay = self.model.rank_decay
        return (1 - rate) * decay * (1 - decay) ** (rank - 1) if rank else rate

    def _target_token(self, prefix_hash: int) -> int:
        first = _first_fill_token(self.model.vocabulary_size)
        return first + prefix_hash % (self.model.vocabulary_size - first)


class SimulatedCache(ModelCache):
    """A session's sequence; its state and its scores are one 64-bit hash per prefix."""

    def __init__(self, model: SimulatedModel, spec: SessionSpec) -> None:
        super().__init__()
        seed = 0 if spec.sampling.temperature == 0 else spec.seed
        self._hashes = array("Q", [_mix(_mix(model.salt & _MASK) ^ seed)])

    def append(self, feed: Feed) -> Sequence[int]:
        """Hash tokens on, and return the hashes of the scored rows."""
        hashes, text_count = self._hashes, len(feed.token_ids) - len(feed.parents)
        for token in feed.token_ids[:text_count]:
            hashes.append(_after(hashes[-1], token))
        text_end = self.length + text_count
        for token, parent in zip(feed.token_ids[text_count:], feed.parents, strict=True):
            hashes.append(_after(hashes[text_end + parent], token))
        return hashes[len(hashes) - feed.scored_count :]

    def _gather(self, path: Sequence[int]) -> None:
        rows = [self._hashes[self.length + 1 + index] for index in path]
        self._hashes[self.length + 1 : self.length + 1 + len(path)] = array("Q", rows)

    def _crop(self, length: int) -> None:
        del self._hashes[length + 1 :]


def simulated_tokenizer(vocabulary_size: int) -> bytes | None:
    """Make a tokenizer.json: text in as one token per byte, fill tokens out as made-up words.

    Returns:
        The same bytes for the same size; None below 256, where not every byte has a token.
    """
    if vocabulary_size < _BYTE_COUNT:
        return None
    byte_tokens = [character for _, character in sorted(LETTERS.items())]
    words = itertools.islice(_words(), vocabulary_size - _BYTE_COUNT)
    vocabulary = {token: index for index, token in enumerate((*byte_tokens, *words))}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    content: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
    return json.dumps(content, ensure_ascii=True).encode()


def _first_fill_token(vocabulary_size: int) -> int:
    return _BYTE_COUNT if vocabulary_size >= 2 * _BYTE_COUNT else 0


def _words() -> Iterator[str]:
    """Count in syllables: " ba", " be", ..., " baba", ... Ġ is byte-level BPE's space."""
    syllables = [a + b for a, b in itertools.product("bdfgklmnprstvz", "aeiou")]
    for length in itertools.count(1):
        for word in itertools.product(syllables, repeat=length):
            yield "Ġ" + "".join(word)


def _wait_until(deadline: float, interrupt: Interrupt) -> None:
    left = 1.0
    while left > 0:
        left = deadline - time.monotonic()
        if interrupt.wait(max(0.0, left - _WAKE_SECONDS)):
            raise ForwardInterrupted


def _after(prefix_hash: int, token: int) -> int:
    return _mix(prefix_hash ^ (token + 1))


def _mix(value: int) -> int:
    """Scramble 64 bits: the finaliser of SplitMix64 (Steele et al. 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
