"""What is said reaches the model, as text or in parts, as a template takes it; or it is refused."""

from __future__ import annotations

import logging

import pytest

from paceline.v1.model_service_pb2 import ChatTemplate
from support.fake_orchestrator import FakeOrchestrator
from support.gateway import gateway_over
from support.library_templates import NAMED_TOKENS, by_the_library
from support.waiting import until

LOOP = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] | trim }}{% elif part.type == 'image' %}"
    "<image>{% endif %}{% endfor %}{% endfor %}"
)
PARTS_ONLY = {
    "a loop": LOOP,
    "the first one": "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}{% endfor %}",
    "the first one by its key": (
        "{% for m in messages %}{{ m.role ~ ': ' ~ m['content'][0]['text'] | upper }}{% endfor %}"
    ),
    "those that are selected": (
        "{% for m in messages %}{{ m.content | selectattr('type', 'equalto', 'text')"
        " | map(attribute='text') | join('|') }}{% endfor %}"
    ),
    "a guard with its instructions": (
        "{{ bos_token }}Judge.\n{% for m in messages %}{% if m.role == 'user' %}User: "
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% else %}Agent: "
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}\n{% endfor %}"
    ),
    "a text of a part as JSON": (
        "{% for m in messages %}{{ {'text': m.content[0].text} | tojson }}{% endfor %}"
    ),
    "a text is refused": (
        "{% for m in messages %}{% if m.content is string %}"
        "{{ raise_exception('parts, please') }}{% endif %}{{ m.content[0].text }}{% endfor %}"
    ),
}
TEXT_ONLY = {
    "a text": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "a text in capitals": "{% for m in messages %}{{ m.content | upper | trim }}{% endfor %}",
    "a text as JSON": "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
    "a text as JSON under the name that parts have": (
        "{% for m in messages %}{{ {'text': m.content} | tojson }}{% endfor %}"
    ),
    "letter by letter": (
        "{% for m in messages %}{% for it in m.content %}{{ it }}{% endfor %}{% endfor %}"
    ),
}
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
BY_ROLE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
LEAVING_OUT = {
    "another name": "{% for m in messages %}<{{ m.role }}>{{ m.text }}{% endfor %}<assistant>",
    "another name in parts": "{% for m in messages %}{{ m.content[0].value }}{% endfor %}",
    "another list": "{% for m in conversation %}{{ m.content }}{% endfor %}You are a guard.",
    "other roles": (
        "{% for m in messages %}{% if m.role == 'human' %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "only its length": "{{ messages[-1].content | length }} letters",
    "the form of parts": "{% for m in messages %}{{ m.content[0].type }}{% endfor %}",
}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Why is the sky blue? \n"},
    {"role": "assistant", "content": "Light."},
    {"role": "user", "content": "\u00dcber?"},
]


def model_with(source):
    template = ChatTemplate(fingerprint="f" * 64, source=source, named_tokens=NAMED_TOKENS)
    return FakeOrchestrator(chat_template=template)


def in_parts(messages):
    return [
        {**it, "content": [{"type": "text", "text": it["content"]}]}
        if isinstance(it["content"], str)
        else it
        for it in messages
    ]


async def prompt_of(source, messages):
    """Return what the model is asked for a conversation."""
    async with gateway_over(model_with(source)) as gateway:
        answer = await gateway.post("/v1/chat/completions", messages=messages, max_tokens=1)
        assert answer.status_code == 200, answer.text
        (asked,) = gateway.requests
    return asked.text


@pytest.mark.parametrize("name", PARTS_ONLY)
async def test_a_template_that_walks_through_parts_gets_parts(name):
    source = PARTS_ONLY[name]
    expected = by_the_library(source, in_parts(CONVERSATION))
    assert await prompt_of(source, CONVERSATION) == expected
    assert await prompt_of(source, in_parts(CONVERSATION)) == expected


@pytest.mark.parametrize("name", TEXT_ONLY)
async def test_a_template_that_writes_a_text_gets_a_text_whatever_was_sent(name):
    source = TEXT_ONLY[name]
    expected = by_the_library(source, CONVERSATION)
    assert await prompt_of(source, CONVERSATION) == expected
    assert await prompt_of(source, in_parts(CONVERSATION)) == expected


async def test_a_template_that_takes_both_gets_what_was_sent():
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for said in (CONVERSATION, in_parts(CONVERSATION), [{"role": "user", "content": two}]):
        assert await prompt_of(BOTH, said) == by_the_library(BOTH, said)


async def test_a_template_may_take_each_role_in_another_form():
    expected = by_the_library(
        BY_ROLE, [in_parts([it])[0] if it["role"] == "user" else it for it in CONVERSATION]
    )
    assert await prompt_of(BY_ROLE, CONVERSATION) == expected
    assert await prompt_of(BY_ROLE, in_parts(CONVERSATION)) == expected


async def test_responses_reach_such_a_template_in_parts_too():
    async with gateway_over(model_with(LOOP)) as gateway:
        answer = await gateway.post(
            "/v1/responses", input="Why?", instructions="Be brief.", max_output_tokens=1
        )
        assert answer.status_code == 200
        (asked,) = gateway.requests
    assert asked.text == "<system>Be brief.<user>Why?"


@pytest.mark.parametrize("name", LEAVING_OUT)
async def test_where_a_template_leaves_out_what_users_say_a_conversation_is_refused(name, caplog):
    with caplog.at_level(logging.WARNING, logger="paceline_gateway"):
        async with gateway_over(model_with(LEAVING_OUT[name])) as gateway:
            answer = await gateway.post("/v1/chat/completions", messages=CONVERSATION)
            answers = await gateway.post("/v1/responses", input="Why?")
            assert not gateway.requests
            assert (await gateway.post("/v1/completions", prompt="p")).status_code == 200
    for each, param in ((answer, "messages"), (answers, "input")):
        assert each.status_code == 400
        error = each.json()["error"]
        assert (error["code"], error["param"]) == ("chat_template_leaves_out", param)
        assert "chat template (ffffffffffff) leaves out users' messages" in error["message"]
    told = [it.getMessage() for it in caplog.records if "'user'" in it.getMessage()]
    assert len(told) == 1


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (LEAVING_OUT["another name"], "(ffffffffffff) leaves out messages of the role 'user'"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "(ffffffffffff) leaves out messages of the role 'system'",
        ),
        ("\n{{ nothing.at_all }}", "(ffffffffffff) fails: line 2: 'nothing' is undefined"),
    ],
)
async def test_what_is_wrong_with_a_template_stands_in_the_log_before_anybody_asks(
    source, told, caplog
):
    with caplog.at_level(logging.WARNING, logger="paceline_gateway"):
        async with gateway_over(model_with(source)):
            await until(lambda: told in caplog.text, what="the log says it")


async def test_what_a_template_leaves_out_of_other_roles_is_left_out_as_in_the_library():
    source = "{{ messages[0].content | length }}{{ messages[-1].content }}"
    assert await prompt_of(source, CONVERSATION) == by_the_library(source, CONVERSATION)


async def test_nothing_is_said_of_a_template_that_keeps_what_is_said(caplog):
    with caplog.at_level(logging.WARNING, logger="paceline_gateway"):
        assert await prompt_of(BOTH, CONVERSATION)
    assert "template" not in caplog.text


BEFORE_DEVELOPERS = (
    "{% for m in messages %}{% if m.role == 'system' %}<system>{{ m.content }}"
    "{% elif m.role == 'user' %}<user>{{ m.content }}{% endif %}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('who?') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "role"),
    [(TEXT_ONLY["a text"], "developer"), (BEFORE_DEVELOPERS, "system"), (STRICT, "system")],
)
async def test_a_developer_speaks_as_the_system_where_a_template_does_not_know_developers(
    source, role
):
    said = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    assert await prompt_of(source, said) == f"<{role}>a<user>b"


async def test_a_participants_name_reaches_a_template_that_has_a_place_for_it():
    source = (
        "{% for m in messages %}<{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}>"
        "{{ m.content }}{% endfor %}"
    )
    said = [{"role": "user", "content": "a", "name": "Ann"}, {"role": "user", "content": "b"}]
    assert await prompt_of(source, said) == by_the_library(source, said)
