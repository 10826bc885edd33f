"""One cell of the equality proof: decode prompts in one way, compare, hold that it was that way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline import Completion, Strategy
from support.equality import NearTie, compare
from support.oracle import Oracle, Sampling
from support.streams import mishaps

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from support.evidence import Evidence
    from support.system import System

TOKENS = 32
SAMPLINGS = {
    "greedy": Sampling(),
    "temperature 0.7": Sampling(temperature=0.7, seed=17),
    "temperature 1, top-p 0.9": Sampling(temperature=1.0, top_p=0.9, seed=2**53 - 1),
}

# Evidence that not every pair of models can give.
ACCEPTANCE = "draft tokens accepted"
TARGETS = "a use of the targets asked for"
OVERLAPS = "verifications at the same time in different processes"


@dataclass(frozen=True)
class Cell:
    strategy: Strategy
    lookahead: int
    target_count: int
    sampling: str
    width: int = 1
    branches: int = 0


@dataclass
class Outcome:
    """What a cell's runs came to, added up.

    `servers_*` is what the model servers saw of the runs without any fallback.
    """

    positions: int = 0
    undisturbed_runs: int = 0
    near_ties: list[NearTie] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    cancelled_rpcs: int = 0
    servers_drafters: int = 0
    servers_accepted: int = 0
    servers_overlaps: int = 0
    servers_withdrawn: int = 0
    servers_targets: int = 0
    corrections_ahead: int = 0
    branch_tokens: int = 0
    servers_trees: int = 0
    servers_runners_up: int = 0

    def add(self, completion: Completion, evidence: Evidence) -> None:
        """Add one run, and what was gathered of it alone."""
        statistics = completion.finished.statistics
        self.positions += len(completion.token_ids)
        self.drafted += statistics.drafted_token_count
        self.accepted += statistics.accepted_token_count
        self.rejected += statistics.rejected_token_count
        self.cancelled_rpcs += statistics.cancelled_rpc_count
        self.corrections_ahead += statistics.corrections_ahead_count
        self.branch_tokens += statistics.branch_token_count
        if not statistics.fallbacks:
            self._add_evidence(evidence)

    def _add_evidence(self, evidence: Evidence) -> None:
        self.undisturbed_runs += 1
        self.servers_drafters = max(self.servers_drafters, evidence.drafters_used)
        self.servers_accepted += evidence.accepted_count
        self.servers_overlaps += evidence.overlap_count
        self.servers_withdrawn += evidence.withdrawn.total()
        self.servers_targets = max(self.servers_targets, evidence.targets_used)
        self.servers_trees += evidence.tree_count
        self.servers_runners_up += evidence.runner_up_count


class EqualityProof:
    """Runs cells on one system; plain decoding runs once for each prompt and kind of sampling."""

    def __init__(self, system: System, oracle: Oracle, tokenizer: Tokenizer) -> None:
        self.oracle = oracle
        self._system = system
        self._tokenizer = tokenizer
        self._plain: dict[tuple[str, str], tuple[int, ...]] = {}

    def ids(self, prompt: str) -> list[int]:
        return list(self._tokenizer.encode(prompt).ids)

    def plain(self, prompt: str, sampling: str) -> tuple[int, ...]:
        """Return the tokens of plain decoding over the wire."""
        key = prompt, sampling
        if key not in self._plain:
            done = self._generate(prompt, sampling, strategy=Strategy.AUTOREGRESSIVE)
            assert done.started.prompt_token_count == len(self.ids(prompt))
            assert done.finished.statistics.drafted_token_count == 0
            self._plain[key] = done.token_ids
        return self._plain[key]

    def run(self, cell: Cell, prompts: list[str], outcome: Outcome) -> None:
        """Decode prompts in the cell's way, and add to its outcome.

        Raises:
            AssertionError: A token differs where there is no near-tie, or something fell back.
        """
        for prompt in prompts:
            expected = self.plain(prompt, cell.sampling)
            evidence = self._system.watch()
            with evidence.gathered():
                done = self._generate(
                    prompt,
                    cell.sampling,
                    strategy=cell.strategy,
                    lookahead=cell.lookahead,
                    targets=cell.target_count,
                    width=cell.width,
                    branches=cell.branches,
                )
            used = done.started.strategy, done.finished.lookahead
            assert used == (cell.strategy, cell.lookahead)
            assert (done.started.width, done.started.branches) == (cell.width, cell.branches)
            assert not mishaps(done)
            if done.finished.statistics.fallbacks:
                self._system.wait_until_whole()
            outcome.add(done, evidence)
            outcome.near_ties += compare(
                self.oracle,
                self.ids(prompt),
                SAMPLINGS[cell.sampling],
                expected=expected,
                actual=done.token_ids,
            )

    def _generate(self, prompt: str, sampling: str, **options: Any) -> Completion:
        chosen = SAMPLINGS[sampling]
        with self._system.client() as client:
            return client.generate(
                prompt,
                max_tokens=TOKENS,
                ignore_eos=True,
                temperature=chosen.temperature,
                top_p=chosen.top_p,
                seed=chosen.seed,
                **options,
            ).collect()


def missing_evidence(cell: Cell, outcome: Outcome, *, undisturbed_runs: int = 4) -> list[str]:
    """Say what the model servers should have seen of the strategy, and did not."""
    overlaps = cell.strategy is Strategy.DISTRIBUTED and cell.target_count > 1
    expected = {
        "runs without any fallback": outcome.undisturbed_runs >= undisturbed_runs,
        "draft calls": outcome.servers_drafters > 0,
        # Not as many: a draft token also counts as accepted where a plain forward agrees with it.
        ACCEPTANCE: min(outcome.servers_accepted, outcome.accepted) > 0,
        TARGETS: (2 if overlaps else 1)
        <= outcome.servers_targets
        <= (cell.target_count if overlaps else 1),
        OVERLAPS: not overlaps or outcome.servers_overlaps > 0,
        "verifications one by one": overlaps or outcome.servers_overlaps == 0,
        "a call withdrawn after a rejection": cell.strategy is Strategy.SPECULATIVE
        or not outcome.rejected
        or (outcome.cancelled_rpcs > 0 and outcome.servers_withdrawn > 0),
    }
    if cell.width > 1:
        expected |= {
            "branches judged": outcome.branch_tokens > 0,
            "trees at the targets": outcome.servers_trees > 0,
            "corrections found ahead": outcome.corrections_ahead > 0,
            "runners-up that a target accepted": outcome.servers_runners_up > 0,
        }
    else:
        expected["no trees"] = not (outcome.servers_trees or outcome.branch_tokens)
    return [what for what, seen in expected.items() if not seen]
