"""The tables of the model card, rendered from `card.json` and from the adapters' own cards."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CARD = "card.json"
CARD_TEXT = "README.md"
_BEGIN = "<!-- tables: written by evaluate.py from card.json -->"
_END = "<!-- end of tables -->"
_ADAPTERS_BEGIN = "<!-- adapters: written by adapters.py from their cards -->"
_ADAPTERS_END = "<!-- end of adapters -->"


def replace_tables(text: str, card: dict[str, Any]) -> str:
    """Return the model card's text with its tables replaced by those of `card.json`."""
    return _replace_between(_BEGIN, render_tables(card), _END, text=text)


def replace_adapters(text: str, folder: Path) -> str:
    """Return the model card's text with its table of adapters replaced by what lies in a folder."""
    cards = [
        json.loads(path.read_text()) for path in sorted(folder.glob("python-target-*/card.json"))
    ]
    return _replace_between(_ADAPTERS_BEGIN, _adapters(cards), _ADAPTERS_END, text=text)


def write_adapters(folder: Path) -> None:
    """Replace the table of adapters in a folder's model card."""
    path = folder / CARD_TEXT
    path.write_text(replace_adapters(path.read_text(encoding="utf-8"), folder), encoding="utf-8")


def render_tables(card: dict[str, Any]) -> str:
    """Render all tables as Markdown."""
    parts = (_quality, _completions, _latency, _cost, _held_out)
    return "\n".join(part(card) for part in parts)


def write_tables(folder: Path, card: dict[str, Any]) -> None:
    """Replace the tables in a folder's model card."""
    path = folder / CARD_TEXT
    path.write_text(replace_tables(path.read_text(encoding="utf-8"), card), encoding="utf-8")


def _replace_between(begin: str, content: str, end: str, *, text: str) -> str:
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the model card has no lines {begin!r} and {end!r}")
    return f"{before}{begin}\n\n{content}\n{end}{after}"


def _adapters(cards: Sequence[dict[str, Any]]) -> str:
    rows = []
    for card in cards:
        facts = card["training"]
        reached = facts["tokens_per_forward"]
        rows.append(
            (
                card["kind"],
                f"{facts['parameters']:,}",
                f"{_tokens(facts) / 1e6:.1f}",
                " ".join(f"{rates[0]:.2f}" for rates in facts["hit_rates"]),
                f"{reached['one guess each']:.2f}",
                f"{reached['two guesses each']:.2f}",
                f"{reached['tree']:.2f}",
            )
        )
    return _table(
        "The target's adapters, on its own greedy continuations of held-out prompts",
        (
            "",
            "parameters",
            "M tokens",
            "best guess right, by distance",
            "tokens per forward, one guess each",
            "two each",
            "the card's tree",
        ),
        rows,
    )


def _tokens(training: dict[str, Any]) -> int:
    """Count what an adapter was trained on, and those before it that it went on from."""
    earlier = training.get("earlier")
    count: int = training["tokens"]
    return count + (_tokens(earlier["training"]) if earlier else 0)


def _quality(card: dict[str, Any]) -> str:
    text = card["real_text"]
    names = list(card["parameters"])
    rows = [("parameters", *(f"{card['parameters'][name]:,}" for name in names))]
    for label, key in (
        ("loss, nats per token", "loss"),
        ("bits per byte", "bits_per_byte"),
        ("same greedy token as the target", "greedy_agreement"),
        ("rejection sampling accepts, T = 1", "rejection_acceptance"),
    ):
        rows.append((label, *(f"{text[key][name]:.3f}" for name in names)))
    return _table(
        f"On the held-out files ({text['tokens']:,} tokens,"
        f" {text['bytes_per_token']:.2f} bytes each)",
        ("", *names),
        rows,
    )


def _completions(card: dict[str, Any]) -> str:
    first = card["completions"][0]
    names = list(first["acceptance"])
    rows = [
        (
            "greedy" if entry["temperature"] == 0 else f"T = {entry['temperature']}",
            *(f"{entry['acceptance'][name]:.3f}" for name in names),
            f"{entry['distinct_4_grams']:.3f}",
            f"{entry['tokenizable']:.2f}",
            f"{entry['tokenizable_if_continued']:.2f}",
        )
        for entry in card["completions"]
    ]
    real = f"{card['real_text']['distinct_4_grams']:.3f}"
    rows.append(("real text", *("" for _ in names), real, "", ""))
    return _table(
        f"{first['count']} completions of held-out prompts by the target, up to 128 tokens each",
        (
            "",
            *(f"acceptance, {name}" for name in names),
            "distinct 4-grams",
            "`tokenize` accepts",
            "… or only cut short",
        ),
        rows,
    )


def _latency(card: dict[str, Any]) -> str:
    median_ms, ratio = card["latency"]["median_ms"], card["latency"]["ratio"]
    counts = list(median_ms["target"])
    return _table(
        "Milliseconds per forward after 200 cached tokens, float32, one thread, median",
        ("rows", *counts, "target / this, one row"),
        [
            (name, *(f"{by_rows[rows]:.1f}" for rows in counts), f"{ratio[name]:.1f}")
            for name, by_rows in median_ms.items()
        ],
    )


def _cost(card: dict[str, Any]) -> str:
    return _table(
        "Training",
        ("stage", "layers", "width", "steps", "M tokens", "minutes", "held-out loss"),
        [
            (
                stage["name"],
                str(stage["layers"]),
                str(stage["width"]),
                str(stage["steps"]),
                f"{stage['tokens'] / 1e6:.1f}",
                f"{stage['seconds'] / 60:.0f}",
                f"{stage['held_out_loss']:.3f}",
            )
            for stage in card["training"]["stages"]
        ],
    )


def _held_out(card: dict[str, Any]) -> str:
    names = ", ".join(f"`{name}`" for name in card["training"]["held_out_files"])
    return f"Held out (Python {card['training']['python']}): {names}.\n"


def _table(title: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{title}:\n\n{body}\n"
