"""A conversation is written as the library that the template was made for writes it."""

from __future__ import annotations

import re

import pytest

from paceline.v1.model_service_pb2 import ChatTemplate
from support.fake_orchestrator import FakeOrchestrator
from support.gateway import gateway_over
from support.library_templates import NAMED_TOKENS, by_the_library

SAID = [
    {"role": "system", "content": "  Stra\u00dfe &amp; <b>\u201equote\u201c</b>\n"},
    {"role": "user", "content": "Gr\u00fc\u00dfe \U0001f44b\U0001f3fd\n\n\tif x:\n\t\tpass"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "\u00fcber \u65e5\u672c\u8a9e "},
]
INDENTED = """
{%- if messages[0]['role'] == 'system' %}
    {% set system = messages[0]['content'] | trim %}
    {% set rest = messages[1:] %}
{% else %}
  {% set system = '' %}
  {% set rest = messages %}
{% endif %}
{{ bos_token }}
    {# a comment, indented #}
{% for message in rest %}
    {% if loop.first and system %}
<<{{ system }}>>
    {% endif %}
    {% if not message['content'] %}
        {% continue %}
    {% endif %}
    [{{ message['role'] | upper }}] {{ message['content'] }}{{ eos_token }}
    {%- if loop.last %} last{% endif %}

{% endfor %}
{% if add_generation_prompt %}
    <assistant>
{% endif %}
"""
TEMPLATES = {
    "indented": INDENTED,
    "trimmed by hand": (
        "{%- for m in messages -%}\n  {{- m.role }}: {{ m.content -}}\n{%- endfor -%}\n"
    ),
    "loop controls": (
        "{% for m in messages %}\n  {% if m.role == 'assistant' %}\n    {% break %}\n"
        "  {% endif %}\n"
        "  {{ loop.index }}/{{ loop.length }} {{ m.content }}\n{% endfor %}"
    ),
    "as JSON": "{{ messages | tojson }}\n{{ messages[0] | tojson(indent=2) }}",
    "undefined names": (
        "[{{ tools }}{{ documents }}{{ nothing }}]{% if tools %}x{% endif %}"
        "{{ messages[-1].content }}"
    ),
    "a namespace": (
        "{% set ns = namespace(n=0) %}\n{% for m in messages %}\n"
        "  {% set ns.n = ns.n + m.content | length %}\n{% endfor %}\n{{ ns.n }}\n"
        "{{ messages[-1].content }}"
    ),
    "marks for training": (
        "{% for m in messages %}\n  {% generation %}\n  {{ m.content }}\n  {% endgeneration %}\n"
        "{% endfor %}"
    ),
    "a date": "{{ strftime_now('%Y') }} {{ messages[-1].content }}",
    "a final newline": "{{ messages[0].content }}\n",
    "a macro": (
        "{% macro say(m) %}\n  <{{ m.role }}>{{ m.content }}\n{% endmacro %}\n"
        "{% for m in messages %}{{ say(m) }}{% endfor %}"
    ),
}  # fmt: skip


def orchestrator(source):
    template = ChatTemplate(fingerprint="t", source=source, named_tokens=NAMED_TOKENS)
    return FakeOrchestrator(chat_template=template)


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_prompt_is_what_the_library_makes_of_the_conversation(name):
    source = TEMPLATES[name]
    async with gateway_over(orchestrator(source)) as gateway:
        answer = await gateway.post("/v1/chat/completions", messages=SAID, max_tokens=1)
        assert answer.status_code == 200
        (asked,) = gateway.requests
    assert asked.text == by_the_library(source, SAID)
    assert (asked.add_special_tokens, asked.parse_special_tokens) == (False, True)


async def test_what_a_template_refuses_is_refused_in_the_librarys_words():
    source = (
        "{% if messages | length > 2 %}\n  {{ raise_exception('too long: \u00fc') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    with pytest.raises(Exception, match="too long: \u00fc"):
        by_the_library(source, SAID)
    async with gateway_over(orchestrator(source)) as gateway:
        answer = await gateway.post("/v1/chat/completions", messages=SAID, max_tokens=1)
        assert not gateway.requests
    assert answer.status_code == 400
    assert re.search(
        "refuses the conversation: too long: \u00fc$", answer.json()["error"]["message"]
    )
