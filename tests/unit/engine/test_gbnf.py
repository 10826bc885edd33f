"""Grammars in llama.cpp's form: what they allow, and what is refused of them."""

from __future__ import annotations

import pytest

from paceline.errors import InvalidFieldError
from paceline_contract.sampling import Grammar, GrammarKind
from paceline_engine.deciding.grammars import GrammarCompiler
from support.tiny_models import build_tokenizer

END = 0
TOKENIZER = build_tokenizer(300)
COMPILER = GrammarCompiler(TOKENIZER.to_str().encode(), vocabulary_size=300, eos_token_ids=[END])
JSON = r"""
# after llama.cpp's own
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::=
  "[" ws (
    value ("," ws value)*   # any number
  )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def allows(grammar: str, text: str) -> bool:
    path = COMPILER.path(Grammar(GrammarKind.LARK, grammar))
    tokens = TOKENIZER.encode(text).ids
    path.add(tokens)
    return path.length == len(tokens) and bool(path.allowed()[END])


@pytest.mark.parametrize(
    ("grammar", "allowed", "refused"),
    [
        (JSON, ['{"a": [1, -2.5, "x\\n"]}', "{}"], ['{"a":}', '{"a": 01}', "[]"]),
        ('root ::= "yes" | "no"', ["yes", "no"], ["maybe", "yesno"]),
        ("root ::= [^a-y\\n]{2,3}", ["zz", "Z9z"], ["z", "az", "z\nz"]),
        (
            'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"',
            ["1", "(1+23)+4"],
            ["1+", "(1"],
        ),
        ('root ::= my-rule root | "."\nmy-rule ::= "a"', ["aa.", "."], ["aa"]),
        ('root ::= "a" tail\ntail ::= "b" |', ["a", "ab"], ["b"]),
        # Escapes, of which the converter would make others.
        (r'root ::= "\u0041\x42" [\u00e4\xf6\U0001F600]', ["ABä", "ABö", "AB😀"], ["ABa"]),
        (r'root ::= "\u0e0112"', ["\u0e0112"], ["\ue0112"]),
        (r'root ::= "\x0a\x22\x5c" [\x5d\x5b\x5e]', ['\n"\\]', '\n"\\^'], ["\n"]),
        ("root ::= [a-z&&x~~] # &&", ["a", "&", "~"], ["-"]),
    ],
)
def test_it_allows_what_its_rules_say(grammar, allowed, refused):
    assert [text for text in allowed if not allows(grammar, text)] == []
    assert [text for text in refused if allows(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('root ::= "a"\n\nroot2 ::= "b', "line 3"),
        ('root ::= "a"\nb ::= [+--]', "has -- in a class, at line 2"),
        (r"root ::= [\ud800]", "no character, at line 1"),
        (r'root ::= "\U00110000"', "no character, at line 1"),
        (r'root ::= "\q"', r"Invalid escape sequence \\q at line 1"),
        ("root ::= nothing", "Rule 'nothing' not found"),
        ('expr ::= "a"', "No 'root' rule"),
        ('root ::= a_b\na_b ::= "a"\na-b ::= "b"', "already exists"),
        ('root ::= <|end|> "a"', "Expected name at line 1"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "recursion"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_place(grammar, reason):
    with pytest.raises(InvalidFieldError, match=reason) as refused:
        COMPILER.compile(Grammar(GrammarKind.LARK, grammar))
    assert refused.value.violations[0].field.startswith("spec.sampling.grammar.lark")


def test_larks_own_grammars_are_read_as_before():
    assert allows('// root ::= "b"\nstart: "a" X\nX: /::=/', "a::=")
