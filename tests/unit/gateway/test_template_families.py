"""Templates with the features of well-known families write what transformers writes, byte by byte.

They were written for this test, feature by feature: `families/` has one for each kind.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from jinja2 import TemplateError

from paceline import ChatTemplate
from paceline_gateway.errors import RequestError
from paceline_gateway.templates.chat_template import ChatTemplates
from paceline_gateway.templates.processes import TemplateProcesses
from support.conversations import conversation_of
from support.library_templates import NAMED_TOKENS, by_the_library

FAMILIES = sorted((Path(__file__).parent / "families").glob("*.jinja"))
TAKES_PARTS_ALONE = {"guard_with_parts"}


def said(*contents, system=None):
    """Return a conversation in which a user and the assistant take turns."""
    turns = [
        {"role": ("user", "assistant")[index % 2], "content": content}
        for index, content in enumerate(contents)
    ]
    return [{"role": "system", "content": system}, *turns] if system is not None else turns


CONVERSATIONS = {
    "one turn": said("Why is the sky blue?"),
    "a system": said("Why?", system="Be brief."),
    "several turns": said("a", "b", "c", "d", "e"),
    "several turns and a system": said("a", "b", "c", system="You are\na pirate.\n"),
    "an answer at the end": said("a", "b"),
    "space around": said("  a \n", "\n\n b\t", " c ", system="  s  "),
    "nothing said": said("", "", ""),
    "an empty system": said("a", system=""),
    "many scripts": said("Gr\u00fc\u00dfe \U0001f44b", "\u65e5 \u0639\u0631", "e\u0301\u2028x"),
    "marks of other languages": said("<b>&amp;</b> {{ x }} {% y %} \\n 'q' \"p\"", "`$a`", "# c"),
    "reasoning in an answer": said(
        "a", "<think>\nfirst\nsecond\n</think>\n\nThe answer.", "b", "no</think>c</think>d", "e"
    ),
    "an answer of a tool": said("a", "b", "<tool_response>\n1\n</tool_response>"),
    "modes": said("a", system="Be brief. /no_think"),
    "two turns of one": [*said("a"), *said("b")],
    "the assistant first": said("a", "b")[1:],
    "a system later": [*said("a", "b"), *said("c", system="late")],
    "a system alone": said(system="alone"),
    "another role": [*said("a"), {"role": "developer", "content": "d"}, *said("c")],
}  # fmt: skip


def in_parts(messages):
    return [{**it, "content": [{"type": "text", "text": it["content"]}]} for it in messages]


def in_the_library(path, messages, *, add_generation_prompt):
    """Return the prompt, or the words of the template's refusal, or that it fails."""
    source = path.read_text()
    if path.stem in TAKES_PARTS_ALONE:
        messages = in_parts(messages)
    try:
        return by_the_library(source, messages, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        return {"refusal": str(error)} if type(error) is TemplateError else {"fault": True}


@pytest.mark.parametrize("path", FAMILIES, ids=lambda it: it.stem)
async def test_a_conversation_is_written_as_by_the_library_or_refused_where_it_raises(path):
    template = ChatTemplate(
        model_fingerprint="m",
        fingerprint=path.stem,
        source=path.read_text(),
        named_tokens=NAMED_TOKENS,
        special_tokens=(),
    )
    templates = ChatTemplates()
    written = {}
    try:
        developer_role = (await templates.look_at(template)).developer_role
        for name, messages in CONVERSATIONS.items():
            checked = conversation_of(messages)
            try:
                written[name] = await templates.render(template, checked, most_bytes=1 << 20)
            except RequestError as error:
                refusal = error.body["error"]
                words = refusal["message"].partition("refuses the conversation: ")[2]
                is_refused = refusal["code"] == "chat_template_refusal"
                written[name] = {"refusal": words} if is_refused else {"fault": True}
    finally:
        await templates.close()
    expected = {
        name: in_the_library(path, as_role(messages, developer_role), add_generation_prompt=True)
        for name, messages in CONVERSATIONS.items()
    }
    assert written == expected
    assert any("sky" in it for it in written.values() if isinstance(it, str))


@pytest.mark.parametrize("path", FAMILIES, ids=lambda it: it.stem)
async def test_without_a_prompt_for_an_answer_it_is_the_same(path):
    processes = TemplateProcesses()
    written = {}
    try:
        for name, messages in CONVERSATIONS.items():
            asked = {
                "source": path.read_text(),
                "named_tokens": NAMED_TOKENS,
                "messages": in_parts(messages) if path.stem in TAKES_PARTS_ALONE else messages,
                "add_generation_prompt": False,
                "most_bytes": 1 << 20,
            }
            answer = await processes.render(asked, fingerprint=path.stem)
            written[name] = {"fault": True} if "fault" in answer else answer.get("text", answer)
    finally:
        await processes.close()
    assert written == {
        name: in_the_library(path, messages, add_generation_prompt=False)
        for name, messages in CONVERSATIONS.items()
    }


def as_role(messages, developer_role):
    """Let developers speak in the role in which the template knows them."""
    return [{**it, "role": developer_role} if it["role"] == "developer" else it for it in messages]


def test_there_are_twenty_kinds_and_each_feature_is_in_one():
    assert len(FAMILIES) >= 20
    together = "".join(path.read_text() for path in FAMILIES)
    for feature in (
        "{% generation", "strftime_now", "raise_exception", "namespace(", "tojson(", "selectattr",
        "macro", "split('</think>')", "tools", "documents", "eos_token", "bos_token", "is string",
        "startswith", "| trim", "loop.first", "messages[1:]",
    ):  # fmt: skip
        assert feature in together
