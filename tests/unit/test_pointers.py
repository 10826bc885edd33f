"""Whatever the pages, the protos and the code point to is there: links, files, sections, tests."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_OURS = {"build", "dist", "demo-output", "node_modules", "__pycache__"}
SUFFIXES = "cpp|go|hpp|json|jsonl|md|png|proto|py|rb|sh|svg|tpl|ts|txt|yaml"
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
POINTER = re.compile(
    rf"(?<![\w/.:<>{{}}$*@~=-])(?P<path>(?:[\w.-]+/)+[\w.-]+\.(?:{SUFFIXES})\b)(?!/)"
    rf"|(?<=`)(?P<name>\w[\w.-]*\.(?:{SUFFIXES}))(?=`|::)"
    r"|::(?P<test>test_\w+)"
    r'|(?<=\.md), "(?P<section>[^"\n]+)"'
)
# Made by a run, or somebody else's: the last four lie in models' folders, in none of ours.
ELSEWHERE = (
    "build/",
    "google/",
    "adapter_config.json",
    "chat_template.json",
    "draft_vocabulary.json",
    "special_tokens_map.json",
)
# The first is what was true when it was written, the second names files of Python's library.
NAMING_OTHERS = ("bench/LOG.md", "models/README.md")


@cache
def files():
    found = []
    for folder, below, names in os.walk(ROOT):
        below[:] = [it for it in below if it not in NOT_OURS and not it.startswith(".")]
        found += [Path(folder, name).relative_to(ROOT).as_posix() for name in names]
    return sorted(found)


PAGES = [it for it in files() if it.endswith(".md")]
SOURCES = [
    it
    for it in files()
    if it.startswith(
        (
            "bench/",
            "cli/",
            "clients/python/",
            "k8s/",
            "local/",
            "orchestrator/",
            "protos/",
            "services/",
        )
    )
    and it.endswith((".proto", ".py", ".yaml", ".tpl"))
    and "_pb2" not in it
]


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def anchors(page):
    titles = HEADING.findall(FENCED.sub("", text_of(page)))
    words = (re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", it)) for it in titles)
    return {it.strip().lower().replace(" ", "-") for it in words}


def lost_links(page):
    for link in LINK.findall(FENCED.sub("", text_of(page))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        end = (ROOT / page).parent / path if path else ROOT / page
        if end.is_dir() and anchor:
            end /= "README.md"
        if not end.exists() or (anchor and anchor not in anchors(os.path.relpath(end, ROOT))):
            yield link


def found(path, *, page):
    """Find the file that a page means: from the page, from the root, or by the end of its name."""
    beside = os.path.normpath(Path(page).parent / path)
    end = "/" + re.sub(r"^(\.\.?/)+", "", path)
    return next((it for it in files() if it == beside or f"/{it}".endswith(end)), None)


def lost_pointers(page):
    """Yield what a text names and nobody finds, whatever is in front of it being its file."""
    file = None
    for match in POINTER.finditer(text_of(page)):
        path = match["path"] or match["name"]
        if path:
            file = found(path, page=page)
            if file is None and not path.startswith(ELSEWHERE):
                yield path
        elif file is None:
            continue
        elif match["test"] and f"def {match['test']}(" not in text_of(file):
            yield f"{file}::{match['test']}"
        elif match["section"] and match["section"] not in HEADING.findall(text_of(file)):
            yield f'{file}, "{match["section"]}"'


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page):
    assert list(lost_links(page)) == []


@pytest.mark.parametrize("page", [it for it in PAGES if it not in NAMING_OTHERS])
def test_every_file_and_test_that_a_page_names_is_there(page):
    assert list(lost_pointers(page)) == []


def test_every_file_and_section_that_code_and_protos_name_is_there():
    lost = {name: names for name in SOURCES if (names := list(lost_pointers(name)))}
    assert lost == {}


def test_links_and_pointers_are_found_at_all():
    assert {"README.md", "docs/architecture.md", "tests/fault/README.md"} <= set(PAGES)
    assert sum(len(LINK.findall(text_of(page))) for page in PAGES) > 50
    kinds = {
        match.lastgroup for it in (*PAGES, *SOURCES) for match in POINTER.finditer(text_of(it))
    }
    assert kinds == {"path", "name", "test", "section"}
