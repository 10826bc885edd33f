"""Grammars as functions of the answer's tokens, and what is refused of them."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
from array import array

import llguidance
import numpy as np
import pytest
import torch

from paceline.errors import InvalidFieldError
from paceline_contract.proposal import NOTHING, Proposal
from paceline_contract.sampling import Grammar, GrammarKind, SamplingParameters
from paceline_engine.deciding.grammars import GrammarCompiler
from paceline_engine.deciding.shaping import Shaper
from paceline_engine.terms.calls import SessionSpec
from support.system import MODELS
from support.tiny_models import build_tokenizer

SIZE, END = 300, 0
TOKENIZER = build_tokenizer(SIZE)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "of": {"enum": ["draft", "target"]}},
    "required": ["n", "of"],
    "additionalProperties": False,
}


def compiler() -> GrammarCompiler:
    raw = TOKENIZER.to_str().encode()
    return GrammarCompiler(raw, vocabulary_size=SIZE, eos_token_ids=[END])


COMPILER = compiler()


def schema(content: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(content))


GRAMMARS = {
    "schema": schema(SCHEMA),
    "any object": schema({"type": "object"}),
    "regex": Grammar(GrammarKind.REGEX, r"[a-c]{2,4}(x|yz)*"),
    "lark": Grammar(GrammarKind.LARK, 'start: "draft" | "target" start'),
    "choices": Grammar(GrammarKind.CHOICES, '["import draft", "import target"]'),
    # As a gateway limits reasoning: so many tokens of any kind, and then the mark.
    "so many tokens": Grammar(GrammarKind.LARK, 'start: <[^0-1]>{0,5} <[1]> "ab"'),
}


def allowed(path) -> set[int]:
    return {*np.flatnonzero(path.allowed()).tolist()}


@pytest.mark.parametrize(
    "grammar",
    [
        schema({"const": "a <|end|> b"}),
        schema({"enum": [{"<|end|>": 1}]}),
        Grammar(GrammarKind.REGEX, r"<\|end\|>x"),
        Grammar(GrammarKind.CHOICES, '["<|end|>"]'),
    ],
)
def test_the_text_of_a_special_token_is_spelled_where_nothing_else_may_follow(grammar):
    path, tokens = COMPILER.path(grammar), []
    while not path.is_complete and len(tokens) < 100:
        tokens.append(min(allowed(path)))
        path.add(tokens[-1:])
        assert path.length == len(tokens)
    assert path.is_complete
    assert END not in tokens
    assert "<|end|>" in TOKENIZER.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("name", GRAMMARS)
def test_what_may_follow_depends_on_the_tokens_alone(name):
    """However a path came to its tokens, it allows what a new path of these tokens allows."""
    chance = random.Random(name)
    path = COMPILER.path(GRAMMARS[name])
    tokens: list[int] = []
    for _ in range(150):
        found = allowed(path)
        again = COMPILER.path(GRAMMARS[name])
        again.add(tokens)
        assert again.length == len(tokens)
        assert allowed(again) == found
        if chance.random() < 0.3 or found == {END}:
            tokens = tokens[: chance.randrange(len(tokens) + 1)]
            path.cut(len(tokens))
        path.add([chance.choice(sorted({*range(1, SIZE)} - found) or [END])])
        path.cut(len(tokens))
        follows = sorted(allowed(path) - {END})
        if follows:
            tokens.append(chance.choice(follows))
            path.add(tokens[-1:])


@pytest.mark.parametrize("name", [*GRAMMARS])
def test_a_complete_text_ends_and_does_not_end_before(name):
    texts = {
        "schema": '{"n": 12, "of": "draft"}',
        "any object": '{"a":[1, {}]}',
        "regex": "abxyz",
        "lark": "targettargetdraft",
        "choices": "import target",
        "so many tokens": "wxyz!ab",
    }
    path = COMPILER.path(GRAMMARS[name])
    for character in texts[name]:
        assert END not in allowed(path) or name == "regex"
        ids = TOKENIZER.encode(character).ids
        path.add(ids)
    assert END in allowed(path)
    assert path.is_complete == (name != "regex")


def shaper(grammar: Grammar, *, min_tokens: int = 0) -> Shaper:
    sampling = SamplingParameters(grammar=grammar, min_tokens=min_tokens)
    spec = SessionSpec(100, sampling=sampling, prompt_length=2, end_token_ids=(END,))
    return Shaper(spec, vocabulary_size=SIZE, grammar=COMPILER.path(grammar))


def test_each_row_of_a_tree_has_the_mask_of_its_own_path():
    own = shaper(GRAMMARS["regex"])
    a, b, x, z = (TOKENIZER.encode(letter).ids[0] for letter in "abxz")
    tree = Proposal((a, z, b, x, a, z), (0, 0, 1, 3, 3, 2))
    found = own.shape(torch.zeros(7, SIZE), array("I", [5, 6]), tree)
    paths = [[], [a], [z], [a, b], [a, b, x], [a, b, a], [z, z]]
    for row, path in zip(found, paths, strict=True):
        fresh = COMPILER.path(GRAMMARS["regex"])
        fresh.add(path)
        if z in path[:1]:  # after what is refused no row is read
            continue
        assert {*torch.nonzero(row == 0)[:, 0].tolist()} == allowed(fresh)
    # And the next call begins at the prefix again.
    again = own.shape(torch.zeros(1, SIZE), array("I", [5, 6]), NOTHING)
    assert torch.equal(again[0], found[0])


def test_a_text_that_is_complete_ends_also_below_min_tokens():
    own = shaper(GRAMMARS["choices"], min_tokens=50)
    ids = TOKENIZER.encode("import draft").ids
    row = own.shape(torch.zeros(1, SIZE), array("I", [5, 6, *ids]), NOTHING)[0]
    assert torch.nonzero(row == 0)[:, 0].tolist() == [END]


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema({"not": {}}), 'Unimplemented keys: ["not"]'),
        (schema({"type": "strin"}), "strin"),
        (schema({"$ref": "https://example.com/schema"}), "does not fetch"),
        (schema({"$ref": "#"}), "allows no text"),
        (schema({"allOf": [{"type": "string"}, {"type": "null"}]}), "Unsatisfiable"),
        (schema([1]), "is not an object"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "is not JSON"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"items":' * 65 + "{}" + "}" * 65), "deeper than 64"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[" * 60_000), "is not JSON"),
        (schema({"enum": ["a" * 70_000]}), "more than 65536 bytes"),
        (schema({"const": "ab c" * 15_000}), "more than 4096 tokens that leaves no choice"),
        (schema(False), "is not an object"),
        (Grammar(GrammarKind.REGEX, "["), "unclosed character class"),
        (Grammar(GrammarKind.REGEX, "(?=a)b"), "look-around"),
        (Grammar(GrammarKind.LARK, 'start: "a" ('), "Expected token"),
        (Grammar(GrammarKind.LARK, "nothing"), "Expected"),
        (
            Grammar(GrammarKind.LARK, "start: %json " + '{"items":' * 6000 + "{}" + "}" * 6000),
            "nested too deep",
        ),
        (
            schema({"allOf": [{"pattern": f".*[a-z]{{{it}}}.*"} for it in range(40)]}),
            "more than 10 patterns",
        ),
        (
            schema(
                {
                    "$defs": {
                        f"a{it}": {"$ref": f"#/$defs/a{it + 1}", "pattern": f".*[a-z]{{{it}}}.*"}
                        for it in range(40)
                    }
                    | {"a40": {"type": "string"}},
                    "$ref": "#/$defs/a0",
                }
            ),
            "more than 10 patterns",
        ),
        (
            schema({"patternProperties": {f"^a{it}.*b{it}$": {} for it in range(400)}}),
            "more than 128 patterns of names",
        ),
        (
            Grammar(
                GrammarKind.LARK,
                "start: T\nT: " + " & ".join(f"/.*[a-z]{{{it}}}.*/" for it in range(30)),
            ),
            "more than 12 `&`",
        ),
        *(
            (
                Grammar(
                    GrammarKind.LARK,
                    f"start: T {odd}"
                    + " & ".join(["\nT: /a\n/", *(f"/.*[a-z]{{{it}}}.*/" for it in range(30))]),
                ),
                "more than 12 `&`",
            )
            # None of them makes a slash or a quotation mark a pair with a later one.
            for odd in ("", "</s>", '<|"|>', '# "', "// /")
        ),
        (
            Grammar(
                GrammarKind.LARK,
                "start: %json "
                + json.dumps({"allOf": [{"pattern": f".*[a-z]{{{it}}}.*"} for it in range(40)]}),
            ),
            "more than 10 patterns",
        ),
        (Grammar(GrammarKind.LARK, 'start: "a" b\nb[max_tokens=3]: /b*/'), "drafts cannot follow"),
        (Grammar(GrammarKind.LARK, 'start: "a" b\nb[stop="c"]: /b*/'), "drafts cannot follow"),
        (Grammar(GrammarKind.LARK, 'start: "aaa!" b\nb[lazy, stop = /c/]: /b*/'), "drafts cannot"),
        (
            # After the token that comes first in the vocabulary no matcher can follow.
            Grammar(
                GrammarKind.LARK,
                'start: r0 b | "z" b\nb[max_tokens=2]: /[a-z]*/\n'
                + "\n".join(f'r{n}: r{n} "a" | r{(n + 1) % 1500} "b" | "c"' for n in range(1500)),
            ),
            "drafts cannot follow",
        ),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(grammar, reason):
    with pytest.raises(InvalidFieldError) as refused:
        COMPILER.compile(grammar)
    (violation,) = refused.value.violations
    assert violation.field.startswith("spec.sampling.grammar")
    assert reason in violation.description
    assert len(violation.description) <= 400
    assert COMPILER.path(GRAMMARS["choices"]).length == 0, "others go on"


def test_many_patterns_and_ampersands_are_no_fault_where_no_text_has_to_match_them_all():
    each = {f"p{it}": {"type": "string", "pattern": f"^a{it}"} for it in range(40)}
    COMPILER.compile(schema({"properties": each, "allOf": [{"type": "object"}]}))
    written = " | ".join('"a && b"' for _ in range(40))
    written += ' | "max_tokens=1" | /stop=/'
    comments = "\n".join(f"{mark} {'&' * 40}" for mark in ("//", "#"))
    COMPILER.compile(Grammar(GrammarKind.LARK, f"start: {written} | /&+/ | /&\n&/\n{comments}"))


def test_a_grammar_over_which_the_library_panics_is_refused(monkeypatch):
    class PanicException(BaseException):
        """As each library in Rust has its own."""

    def panic(*_arguments, **_options):
        raise PanicException("index out of bounds")

    own = compiler()
    panic.grammar_from_regex = llguidance.LLMatcher.grammar_from_regex
    monkeypatch.setattr(llguidance, "LLMatcher", panic)
    with pytest.raises(InvalidFieldError, match="cannot be compiled: index out of bounds"):
        own.compile(Grammar(GrammarKind.REGEX, "a panic"))


def test_a_grammar_is_compiled_once_and_the_oldest_is_forgotten():
    own = compiler()
    for number in range(257):
        own.compile(Grammar(GrammarKind.REGEX, f"a{number}"))
    assert not own.knows(Grammar(GrammarKind.REGEX, "a0"))
    assert own.knows(Grammar(GrammarKind.REGEX, "a1"))


class WatchedGrammar:
    """A grammar that counts how often its text is read."""

    kind = GrammarKind.LARK
    reads = 0

    @property
    def text(self) -> str:
        self.reads += 1
        return "start: <[5]> <[6]>"


def test_the_text_of_a_grammar_is_read_when_it_is_compiled_and_for_no_answer_again():
    grammar = WatchedGrammar()
    COMPILER.compile(grammar)
    reads = grammar.reads
    for _ in range(2):
        assert allowed(COMPILER.path(grammar)) == {5}
    assert grammar.reads == reads > 0


COMPLEX = schema({"type": "object", "properties": {f"p{n}": {} for n in range(1500)}})
"""Each of these properties may be left out, so all that come later may follow."""
BEGUN = TOKENIZER.encode('{"p0":1,').ids


def test_what_is_too_complex_is_told_for_as_long_as_its_tokens_are_there():
    path = COMPILER.path(COMPLEX)
    before = allowed(path)
    path.add(BEGUN)
    assert path.length < len(BEGUN)
    assert "max is 2000" in path.failure
    path.cut(0)
    assert not path.failure
    assert allowed(path) == before


def test_only_rows_that_were_decided_by_fail():
    """A draft of which a token is too complex for the grammar harms nothing: it is rejected."""
    own = shaper(COMPLEX)
    prompt = array("I", [5, 6])
    own.shape(torch.zeros(len(BEGUN) + 1, SIZE), prompt, Proposal(tuple(BEGUN)))
    own.check([0])
    with pytest.raises(InvalidFieldError, match="max is 2000"):
        own.check(range(len(BEGUN) + 1))
    own.shape(torch.zeros(1, SIZE), prompt, NOTHING)
    own.check([0])


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(
            GrammarKind.LARK,
            "start: a0\n" + "\n".join(f"a{n}: a{n + 1}" for n in range(4000)) + '\na4000: "x"',
        ),
        Grammar(
            GrammarKind.LARK,
            "start: a0\n" + "\n".join(f'a{n}: "x" a{n + 1}' for n in range(3000)) + '\na3000: "x"',
        ),
        schema(
            {
                "$ref": "#/$defs/0",
                "$defs": {
                    **{str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(1200)},
                    "1200": {},
                },
            }
        ),
        schema(
            {
                "$ref": "#/$defs/0",
                "$defs": {
                    **{str(n): {"allOf": [{"$ref": f"#/$defs/{n + 1}"}]} for n in range(1300)},
                    "1300": {},
                },
            }
        ),
        Grammar(GrammarKind.LARK, "start: " + "(" * 30_000 + '"x"' + ")" * 30_000),
        Grammar(GrammarKind.REGEX, "(" * 30_000 + "x" + ")" * 30_000),
    ],
    ids=["rules", "rules with texts", "items", "allOf", "brackets", "groups"],
)
def test_a_deep_grammar_ends_no_process(grammar):
    """In a process of its own: a stack that is too small ends it, and no exception comes."""
    script = (
        "import sys, pickle\n"
        "from paceline_engine.deciding.grammars import GrammarCompiler\n"
        "from paceline.errors import InvalidFieldError\n"
        "tokenizer, grammar = pickle.load(sys.stdin.buffer)\n"
        f"compiler = GrammarCompiler(tokenizer, vocabulary_size={SIZE}, eos_token_ids=[{END}])\n"
        "try:\n"
        "    path = compiler.path(grammar)\n"
        "    path.allowed(); path.add([1]); path.cut(0)\n"
        "    print('compiled')\n"
        "except InvalidFieldError:\n"
        "    print('refused')\n"
    )
    given = pickle.dumps((TOKENIZER.to_str().encode(), grammar))
    done = subprocess.run([sys.executable, "-c", script], input=given, capture_output=True)
    assert (done.returncode, done.stdout.strip()) in {(0, b"compiled"), (0, b"refused")}


def test_a_grammar_with_endless_choices_at_a_step_ends_with_an_error():
    """Masks are computed between other clients' forwards."""
    rules = "\n".join(f'r{n}: r{n} "a" | r{(n + 1) % 1500} "b" | "c"' for n in range(1500))
    path = COMPILER.path(Grammar(GrammarKind.LARK, f"start: r0\n{rules}"))
    for _ in range(4):
        path.add(TOKENIZER.encode("c").ids)
        path.allowed()
    assert "items" in path.failure


def test_a_very_long_text_without_a_choice_ends_its_request_and_takes_no_further_masks():
    """Each mask before it takes as long as several forwards, and a block has many rows."""
    own = shaper(Grammar(GrammarKind.REGEX, "[ab]c{9000}"))
    tokens = [*TOKENIZER.encode("a").ids, *TOKENIZER.encode("c" * 8).ids]
    logits, proposal = torch.zeros(len(tokens) + 1, SIZE), Proposal(tuple(tokens))
    shaped = own.shape(logits, array("I", [5, 6]), proposal)
    own.check([0])
    assert torch.isinf(shaped[0]).any()
    assert not torch.isinf(shaped[1:]).any()
    for row in range(1, len(tokens) + 1):
        with pytest.raises(InvalidFieldError, match="leaves no choice"):
            own.check([row])


def test_a_mask_is_that_of_a_path_that_begins_here():
    """A tokenizer that has `'s` as a token, too, cuts the whole text within it."""
    tokenizer = (MODELS / "python-target" / "tokenizer.json").read_bytes()
    own = GrammarCompiler(tokenizer, vocabulary_size=2048, eos_token_ids=[0])
    grammar = Grammar(GrammarKind.CHOICES, json.dumps(["\U0001f600's x"]))
    path, taken = own.path(grammar), []
    forced = path.forced(64)
    while not path.is_complete:
        fresh = own.path(grammar)
        fresh.add(taken)
        (token,) = allowed(path)
        assert {token} == allowed(fresh)
        taken.append(token)
        path.add([token])
    assert taken != forced, "the tokenizer is not of this kind"
