"""Plays a trace: a text with events, to which it writes what a method answers.

traces/README.md has the language.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paceline_contract.calls import VerificationRule
from paceline_contract.proposal import Proposal
from paceline_protocol.messages import (
    AbandonVerify,
    BlockVerified,
    CapacityChanged,
    Command,
    DecodeEnded,
    DecodeFailed,
    DraftEnded,
    DraftFailed,
    EmitTokens,
    Event,
    Finish,
    PromoteVerify,
    StartDecode,
    StartDraft,
    StartVerify,
    StopDecode,
    StopDraft,
    TokensDecoded,
    TokensDrafted,
    VerifyFailed,
)
from paceline_protocol.methods import METHODS
from paceline_protocol.task import DecodingTask, DispatchPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paceline_protocol.node import Node
    from paceline_protocol.tree import TokenTree

_ANSWER = "  "
_GIVEN = {
    r"(\d+) targets?": lambda n: {"targets": int(n)},
    r"(\d+) drafters?": lambda n: {"drafters": int(n)},
    r"prompt ([\d ]+)": lambda ids: {"prompt": _numbers(ids)},
    r"lookahead (\d+)": lambda n: {"lookahead": int(n)},
    r"at most (\d+) tokens": lambda n: {"max_tokens": int(n)},
    r"eos (\d+)": lambda token: {"eos_ids": frozenset({int(token)})},
    r"window (\d+)": lambda n: {"draft_window": int(n)},
    r"width (\d+)": lambda n: {"width": int(n)},
    r"(\d+) branch(?:es)?": lambda n: {"branches": int(n)},
    r"trees of (\d+)": lambda n: {"tree_tokens": int(n)},
    r"in blocks": lambda: {"dispatch": DispatchPolicy.BLOCKS},
    r"own guesses": lambda: {"own_guesses": True},
    r"drafting ahead": lambda: {"drafts_ahead": True},
    r"rejection sampling": lambda: {"rule": VerificationRule.REJECTION},
    r"broadcast prefill": lambda: {"broadcast_prefill": True},
    r"kept prefill": lambda: {"keep_prefill": True},
}


def played(text: str) -> str:
    """Return the trace with the answers that its method gives today."""
    player: _Player | None = None
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(_ANSWER):
            continue
        lines.append(line)
        if line.startswith("given "):
            player = _Player(line.removeprefix("given "))
        elif line and not line.startswith("#"):
            assert player, "a trace begins with what is given"
            lines += (_ANSWER + answer for answer in player.answer(line))
    return "\n".join(lines) + "\n"


class _Player:
    def __init__(self, given: str) -> None:
        label, *words = given.split(", ")
        options = {"targets": 2, "drafters": 1, "prompt": (1, 2), "max_tokens": 20}
        for word in words:
            options |= _read(_GIVEN, word)
        targets, drafters = (tuple(range(options.pop(role))) for role in ("targets", "drafters"))
        self._prompt = self._final = options["prompt"]
        (row,) = (row for row in METHODS.values() if row.label == label)
        self._method = row.create(DecodingTask(**options), CapacityChanged(targets, drafters))
        self._drawn: list[str] = []
        self._is_over = False

    def answer(self, line: str) -> Iterator[str]:
        match line:
            case "statistics":
                yield from self._statistics()
                return
            case "start":
                commands = self._method.start()
            case "stop":
                commands = self._method.stop()
            case _:
                commands = self._method.handle(_event(line))
        yield from (f"-> {self._words(command)}" for command in commands)
        yield from [] if commands else ["-> nothing"]
        for command in commands:
            if isinstance(command, EmitTokens):
                self._final += command.token_ids
        self._is_over |= any(isinstance(command, Finish) for command in commands)
        drawn = self._drawing()
        if drawn != self._drawn and not self._is_over:
            self._drawn = drawn
            yield from drawn or [f"tree: {self._committed}"]

    def _drawing(self) -> list[str]:
        """Draw what follows the committed text, of a method that has a tree."""
        tree: TokenTree | None = getattr(self._method, "tree", None)
        if tree is None or not tree.root.children:
            return []
        head = f"tree: {self._committed} "
        first, *more = _branches(tree.root)
        return [head + first, *(" " * len(head) + line for line in more)]

    @property
    def _committed(self) -> str:
        return self._text(self._final)

    def _statistics(self) -> Iterator[str]:
        counts = self._method.statistics
        yield (
            f"{counts.drafted} drafted: {counts.accepted} accepted, {counts.rejected} rejected,"
            f" {counts.discarded} discarded; {counts.own} of the target's own"
        )
        yield f"acceptance rate: {counts.acceptance_rate:.3f}"
        if counts.branch_drafted:
            yield (
                f"beside the chains: {counts.branch_drafted} drafted, {counts.branch_judged}"
                f" judged, {counts.branch_accepted} of them right;"
                f" {counts.corrections_ahead} corrections found ahead"
            )

    def _words(self, command: Command) -> str:
        match command:
            case StartDraft():
                at_once = f", {command.chunk_tokens} at a time" if command.chunk_tokens > 1 else ""
                width = f", {command.width} wide" if command.width > 1 else ""
                branches = f", {command.branch_count} branches" if command.branch_count else ""
                return (
                    f"draft {command.draft_id} at drafter {command.drafter}:"
                    f" {self._text(command.prefix)} and at most {command.max_tokens} more"
                    f"{at_once}{width}{branches}"
                )
            case StopDraft():
                return f"stop draft {command.draft_id}"
            case StartVerify():
                block = f" + {_tokens(command.proposal)}" if len(command.proposal) else ""
                asked = " and propose" if command.propose else ""
                branch = ", of a branch" if command.is_branch else ""
                return (
                    f"verify {command.verify_id} at target {command.target}:"
                    f" {self._text(command.prefix)}{block} (depth {command.depth}{branch}){asked}"
                )
            case PromoteVerify():
                return f"verify {command.verify_id} comes to depth {command.depth}"
            case AbandonVerify():
                return f"abandon verify {command.verify_id}"
            case StartDecode():
                return (
                    f"decode {command.decode_id} at target {command.target}:"
                    f" {self._text(command.prefix)} and at most {command.max_tokens} more"
                )
            case StopDecode():
                return f"stop decode {command.decode_id}"
            case EmitTokens():
                return f"emit {_origins(command)}"
            case Finish():
                return f"finish: {command.reason.value}"

    def _text(self, prefix: tuple[int, ...]) -> str:
        length = len(self._prompt)
        assert prefix[:length] == self._prompt
        return f"[{_joined(('prompt', *prefix[length:]))}]"


def _event(line: str) -> Event:
    events = {
        r"drafted (\d+): (.+)": lambda i, ids: TokensDrafted(int(i), _proposal(ids)),
        r"draft (\d+) ended": lambda i: DraftEnded(int(i)),
        r"draft (\d+) failed": lambda i: DraftFailed(int(i)),
        r"verified (\d+): accepts (path )?([\d ]+), then (\d+)"
        r"(?:, logprobs (.+?))?(?:, proposes (.+))?": (_verdict),
        r"verify (\d+) failed": lambda i: VerifyFailed(int(i)),
        r"decoded (\d+): ([\d ]+?)(?:, logprobs (.+))?": _decoded,
        r"decode (\d+) ended": lambda i: DecodeEnded(int(i)),
        r"decode (\d+) failed": lambda i: DecodeFailed(int(i)),
        r"servers: targets (.+?); drafters (.+?)(?:; leaving (.+?))?(?:; lookahead (\d+))?": (
            _servers
        ),
    }
    return _read(events, line)


def _verdict(
    verify_id: str,
    of_a_tree: str | None,
    accepted: str,
    next_token: str,
    logprobs: str | None,
    proposed: str | None,
) -> Event:
    return BlockVerified(
        int(verify_id),
        _numbers(accepted) if of_a_tree else tuple(range(int(accepted))),
        int(next_token),
        logprobs=tuple(map(float, (logprobs or "").split())),
        proposal=_proposal(proposed or ""),
    )


def _decoded(decode_id: str, token_ids: str, logprobs: str | None) -> Event:
    return TokensDecoded(
        int(decode_id),
        _numbers(token_ids),
        logprobs=tuple(map(float, (logprobs or "").split())),
    )


def _servers(targets: str, drafters: str, leaving: str | None, lookahead: str | None) -> Event:
    return CapacityChanged(
        _numbers(targets),
        _numbers(drafters),
        leaving=_numbers(leaving or "none"),
        lookahead=int(lookahead) if lookahead else None,
    )


def _proposal(words: str) -> Proposal:
    """Read `10 11`, with what they were drawn from `10~p 11~q`, or a tree's with parents `0/10`."""
    places = [word.rpartition("/") for word in words.split()]
    pairs = [word.partition("~") for _, _, word in places]
    return Proposal(
        tuple(int(token) for token, _, _ in pairs),
        parents=tuple(int(parent) for parent, slash, _ in places if slash),
        distributions=tuple(drawn for _, _, drawn in pairs if drawn),
    )


def _tokens(proposal: Proposal) -> str:
    if proposal.parents:
        return _joined(map("{}/{}".format, proposal.parents, proposal.token_ids))
    drawn = [f"~{each}" for each in proposal.distributions] or [""] * len(proposal)
    return _joined(f"{a}{b}" for a, b in zip(proposal.token_ids, drawn, strict=True))


def _origins(emission: EmitTokens) -> str:
    words = [
        f"{token} ({'drafted' if accepted else 'own'})"
        for token, accepted in zip(emission.token_ids, emission.accepted, strict=True)
    ]
    logprobs = f", logprobs {_joined(emission.logprobs)}" if emission.logprobs else ""
    return _joined(words) + logprobs


def _branches(node: Node) -> Iterator[str]:
    """Draw what follows a node, each branch on lines of its own."""
    children = list(node.children.values())
    for child in children:
        is_first, is_last = child is children[0], child is children[-1]
        stem = ("──" if is_last else "┬─") if is_first else ("└─" if is_last else "├─")
        is_decided = node.fact is not None
        mark = "!" if is_decided else "" if child.dispatch.assigned else "?"
        mark += "'" if child.draft.is_branch else ""
        label = f"{stem} {child.token_id}{mark} "
        first, *more = list(_branches(child)) or [""]
        yield (label + first).rstrip()
        indent = (" " if is_last else "│") + " " * (len(label) - 1)
        yield from (indent + line for line in more)


def _read(grammar, line):
    for pattern, read in grammar.items():
        if found := re.fullmatch(pattern, line):
            return read(*found.groups())
    raise AssertionError(f"not a word of this language: {line!r}")


def _numbers(words: str) -> tuple[int, ...]:
    return () if words == "none" else tuple(map(int, words.split()))


def _joined(words: Iterable[object]) -> str:
    return " ".join(map(str, words))
