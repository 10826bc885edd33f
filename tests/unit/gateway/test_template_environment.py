"""A template finds here what it finds in the library that it was made for, and fails where it does.

What fails is told in the template's words: the line, and what is wrong there.
"""

from __future__ import annotations

import re
from contextlib import asynccontextmanager

import pytest

from paceline import ChatTemplate
from paceline_gateway.errors import RequestError
from paceline_gateway.templates.chat_template import ChatTemplates
from support.conversations import conversation_of
from support.library_templates import NAMED_TOKENS, by_the_library

SAID = [
    {"role": "system", "content": "  Stra\u00dfe <b>\u201equote\u201c</b>\n"},
    {"role": "user", "content": "Gr\u00fc\u00dfe \U0001f44b\U0001f3fd\n\n\tif x:\n\t\tpass"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "\u00fcber \u65e5\u672c\u8a9e "},
]
SAY = "{{ messages[1].content }}{{ messages[3].content }}"
EQUAL = {
    "JSON in ASCII": "{{ messages | tojson(ensure_ascii=True) }}",
    "JSON as it is": "{{ messages | tojson(ensure_ascii=False) }}",
    "JSON by position": "{{ messages | tojson(true, 2, [',', ':'], true) }}",
    "JSON with separators": "{{ messages[1] | tojson(separators=(',', ': ')) }}",
    "JSON in order": "{{ {'b': messages[1].content, 'a': 1} | tojson(sort_keys=True) }}",
    "JSON with an indent of text": "{{ messages[1] | tojson(indent='\t') }}",
    "JSON of nothing and of numbers": "{{ [none, true, 1.5, 10**20] | tojson }}" + SAY,
    "marks for training": (
        "{% for m in messages %}{% if m.role == 'assistant' %}  {%- generation -%}  said"
        " {{ m.content }} {% set x = 1 %}{%- endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}[{{ x }}]"
    ),
    "marks in a macro": (
        "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}"
    ),
    "a date by name": "{{ strftime_now(format='%Y') }}" + SAY,
    "a date without a zone": "[{{ strftime_now('%z%Z') }}]" + SAY,
    "a dictionary": "{{ dict(a=1, b=2) }}{{ dict([('a', 1)]) }}{{ dict.fromkeys('ab', 0) }}" + SAY,
    "a namespace": (
        "{% set ns = namespace(self=1, n=0) %}{% set ns.n = ns.n + 2 %}{{ ns.self }}{{ ns.n }}"
        "{% set other = namespace({'a': 5}) %}{{ other.a }}" + SAY
    ),
    "an undefined name": "[{{ nothing }}{{ messages[1].nothing }}{{ nothing | length }}]" + SAY,
    "an undefined name, asked for": (
        "{{ nothing is defined }}{{ tools is none }}{{ documents is none }}"
        "{{ nothing == '' }}{% for x in nothing %}{% endfor %}{{ nothing | default('d') }}" + SAY
    ),
    "a negative index and slices": "{{ messages[-1].content[::-1] }}{{ messages[1:][0].content }}",
    "methods of text": (
        "{{ messages[1].content.split('\n')[0].strip().upper().title().startswith('G') }}" + SAY
    ),
    "filters": (
        "{{ messages | map(attribute='content') | join('|') }}{{ messages | selectattr('role',"
        " 'equalto', 'user') | list | length }}{{ messages[1].content | indent(2) | trim }}"
        "{{ messages[1] | items | list }}{{ messages[1] | dictsort }}{{ [3, 1] | sort | first }}"
    ),
    "markup is left alone": "{{ messages[0].content }}{{ '<&>' }}{{ '<' | e }}{{ '<' | safe }}",
    "loop controls": (
        "{% for m in messages %}{% if loop.index == 1 %}{% continue %}{% endif %}"
        "{% if loop.last %}{% break %}{% endif %}{{ m.content }}{% endfor %}" + SAY
    ),
    "a recursive loop": (
        "{% for x in [1, [2, 3]] recursive %}{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}"
        "{% endif %}{% endfor %}" + SAY
    ),
    "a call block and a filter block": (
        "{% macro a() %}<{{ caller() }}>{% endmacro %}{% call a() %}x{% endcall %}"
        "{% filter upper %}y{% endfilter %}" + SAY
    ),
    "whitespace before a tag": "x\n   {% if true %}\n  y\n   {%+ if true %} z{% endif %}"
    "{% endif %}\n\n  {# no #}\n" + SAY,
    "a raw block": "{% raw %}{{ no }}{% endraw %}" + SAY,
    "a line that looks like a statement": "# for x in y\n## no\n" + SAY,
    "a named token that is there": "{{ bos_token }}{{ eos_token + 'x' }}{{ pad_token }}" + SAY,
    "a prompt for generation": "{{ add_generation_prompt }}" + SAY,
    "arithmetic": "{{ 7 // 2 }}{{ 7 / 2 }}{{ 2 ** 3 }}{{ 7 % 4 }}{{ 'a' * 3 }}{{ 'a' ~ 1 }}" + SAY,
    "constants and tests": "{{ True and not False }}{{ 1 is odd }}{{ 'a' in 'cat' }}" + SAY,
    "a list that stays as it is": "{% set x = [1] + [2] %}{{ x }}{{ x | tojson }}" + SAY,
    "a range": "{{ range(3) | list }}{{ range(1, 9, 4) | list }}" + SAY,
}  # fmt: skip
# What the library raises an error at, and what is said here.
FAULTS = {
    "{% nonsense %}": "line 1: Encountered unknown tag 'nonsense'",
    "\n{{ messages | }}": "line 2: ",
    "{% do messages %}": "line 1: Encountered unknown tag 'do'",
    "{% trans %}x{% endtrans %}": "line 1: Encountered unknown tag 'trans'",
    "{% generation %}": "line 1: Unexpected end of template",
    "{{ messages | nonsense }}": "line 1: No filter named 'nonsense'",
    "{{ messages is nonsense }}": "line 1: No test named 'nonsense'",
    "\n\n{{ nothing.at_all }}": "line 3: 'nothing' is undefined",
    "{{ messages[0].nothing.at_all }}": "line 1: there is no attribute 'nothing'",
    "{{ messages[9].content }}": "line 1: there is no element 9",
    "{{ nothing + 'x' }}": "line 1: 'nothing' is undefined",
    "{{ nothing() }}": "line 1: 'nothing' is undefined",
    "{{ nothing | tojson }}": "line 1: it uses a value in an unsupported way",
    "{{ messages[0].content + 1 }}": "line 1: it uses a value in an unsupported way",
    "{{ messages + 1 }}": "line 1: it uses a value in an unsupported way",
    "{{ none() }}": "line 1: it uses a value in an unsupported way",
    "{{ messages | tojson(sort=True) }}": "line 1: it uses a value in an unsupported way",
    "{{ raise_exception() }}": "line 1: it uses a value in an unsupported way",
    "{% include 'x' %}": "line 1: it uses a value in an unsupported way",
    "{{ 1 / 0 }}": "line 1: it divides by zero",
    "{{ 2.0 ** 99999 }}": "line 1: a number in it is too large",
    "{% for a in range(99999999) %}{% endfor %}": "line 1: a number in it is too large",
    "{{ 'x' | int(base=99) }}{{ 'abc'.index('z') }}": "line 1: a value in it cannot be used",
    "{{ {}.popitem() }}": "line 1: it uses something forbidden to templates",
    "{{ messages.append(1) }}": "line 1: it uses something forbidden to templates",
    "{{ ''.__class__.__mro__ }}": "line 1: it uses something forbidden to templates",
    "{% set ns = namespace(_x=1) %}": "line 1: it uses something forbidden to templates",
    "{% set ns = namespace() %}{% set ns._x = 1 %}": "it uses something forbidden to templates",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}": "line 1: it calls itself endlessly",
    "{% set messages.x = 1 %}": "line 1: cannot assign attribute on non-namespace object",
    "{{ messages | map(nonsense=1) | list }}": "line 1: it gives a filter a wrong argument",
}  # fmt: skip
PYTHON = re.compile(
    r"\b(str|dict|list|tuple|int|float|bool|NoneType|Undefined|object|\w+Error|builtin\w*)\b"
)


@asynccontextmanager
async def rendering(source):
    """Yield what writes conversations by this template."""
    templates = ChatTemplates()
    template = ChatTemplate(
        model_fingerprint="m",
        fingerprint="f" * 64,
        source=source,
        named_tokens=NAMED_TOKENS,
        special_tokens=(),
    )

    async def render(said):
        return await templates.render(template, conversation_of(said), most_bytes=1 << 20)

    try:
        yield render
    finally:
        await templates.close()


@pytest.mark.parametrize("name", EQUAL)
async def test_what_a_template_uses_gives_what_it_gives_in_the_library(name):
    async with rendering(EQUAL[name]) as render:
        assert await render(SAID) == by_the_library(EQUAL[name], SAID)


@pytest.mark.parametrize("source", FAULTS)
async def test_what_fails_in_the_library_is_told_as_the_templates_fault(source):
    with pytest.raises(Exception):  # noqa: B017, PT011 - of any class
        by_the_library(source, SAID)
    async with rendering(source) as render:
        with pytest.raises(RequestError) as raised:
            await render(SAID)
    error = raised.value.body["error"]
    assert error["code"] == "chat_template_fault"
    head, _, told = error["message"].partition(" fails: ")
    assert head == "messages: the model's chat template (ffffffffffff)"
    assert FAULTS[source] in told
    assert not PYTHON.search(told.replace("non-namespace object", ""))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('too l\u00f6ng: ' ~ messages | length) }}", "too l\u00f6ng: 4"),
        ("{{ raise_exception(message='by name') }}", "by name"),
        ("{% for m in messages %}{{ m.content or raise_exception('empty') }}{% endfor %}", "empty"),
    ],
)
async def test_what_a_template_refuses_is_told_in_its_own_words(source, words):
    with pytest.raises(Exception, match=re.escape(words)):
        by_the_library(source, SAID)
    async with rendering(source) as render:
        with pytest.raises(RequestError) as raised:
            await render(SAID)
    error = raised.value.body["error"]
    assert error["code"] == "chat_template_refusal"
    assert error["message"].endswith(f"refuses the conversation: {words}")


async def test_what_one_conversation_leaves_behind_is_not_there_for_the_next():
    source = "{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}" + SAY
    async with rendering(source) as render:
        assert await render(SAID) == await render(SAID) == by_the_library(source, SAID)
