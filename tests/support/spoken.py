"""Models that speak Hermes' dialect, as a fake orchestrator: what they say, token by token."""

from __future__ import annotations

from pathlib import Path

from paceline.v1.model_service_pb2 import ChatTemplate
from support.fake_orchestrator import FakeOrchestrator, Leg

FOLDER = Path(__file__).parents[1] / "unit/gateway/tool_families"
IDS = {"<tool_call>": 900, "</tool_call>": 901, "<think>": 902, "</think>": 903, "<|im_end|>": 904}
HELLO = ((5, "Hel"), (6, "lo"), (904, ""))
CALL = (
    (5, "I"),
    (6, " look.\n"),
    (900, ""),
    (7, '\n{"name": "wea'),
    (8, 'ther", "arguments": {"ci'),
    (9, 'ty": "Bo'),
    (10, 'nn"}'),
    (11, "}\n"),
    (901, ""),
    (904, ""),
)
THOUGHT = ((902, ""), (12, "\nit"), (13, " is"), (14, " far\n"), (903, ""), (15, "\n\n"))


def template_of(name="hermes", *, special=tuple(IDS), ids=IDS):
    return ChatTemplate(
        fingerprint=f"{name}-{len(special)}-{len(ids)}",
        source=(FOLDER / f"{name}.jinja").read_text(),
        named_tokens={"bos_token": "<s>", "eos_token": "<|im_end|>"},
        special_tokens=special,
        added_token_ids=ids,
    )


def model(*said, template=None):
    legs = [Leg(said=tuple(it)) for it in said]
    return FakeOrchestrator(script=legs, chat_template=template or template_of())
