"""Keys: who has one may call, within its limits; the file is followed; nothing tells of them."""

from __future__ import annotations

import pytest

from paceline.errors import OverloadedError, UnauthenticatedError
from paceline_serving.keys import Caller, Key, Keys, authorization_of, follow_key
from support.keys import SECRET, entry, rewrite


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(entry())
    return file


@pytest.mark.parametrize(
    "header",
    ["", SECRET, f"Basic {SECRET}", "Bearer", "Bearer ", f"Bearer {SECRET}x", "Bearer \xff"],
)
def test_what_is_no_key_is_refused(path, header):
    with pytest.raises(UnauthenticatedError, match="authorization: Bearer KEY") as refused:
        Keys(path).find(header)
    assert SECRET not in str(refused.value)


def test_whether_a_key_is_missing_or_wrong_is_said(path):
    keys = Keys(path)
    with pytest.raises(UnauthenticatedError, match="is missing"):
        keys.find("")
    with pytest.raises(UnauthenticatedError, match="is wrong"):
        keys.find("Bearer other")


def test_the_file_is_read_again_when_it_changes_and_a_broken_one_changes_nothing(path, caplog):
    keys = Keys(path)
    alice = keys.find(f"Bearer {SECRET}")
    rewrite(path, entry("bob", "other") + entry(requests_at_once=3))
    assert keys.find("Bearer other").key.name == "bob"
    assert keys.find(f"Bearer {SECRET}") is alice
    assert alice.key.requests_at_once == 3
    rewrite(path, "- name: bob\n  sha256: short\n")
    assert keys.find("Bearer other").key.name == "bob"
    assert "stays in use" in caplog.text
    rewrite(path, entry("bob", "other"))
    with pytest.raises(UnauthenticatedError):
        keys.find(f"Bearer {SECRET}")


def test_that_the_file_is_gone_is_logged_once_and_what_it_said_holds_until_it_is_back(path, caplog):
    keys = Keys(path)
    path.unlink()
    for _ in range(3):
        assert keys.find(f"Bearer {SECRET}").key.name == "alice"
    assert caplog.text.count("No such file") == 1
    rewrite(path, entry("bob", "other"))
    assert keys.find("Bearer other").key.name == "bob"


@pytest.mark.parametrize(
    "text",
    ["{", "a: b", entry() + entry(), entry(more=1), entry(requests_at_once=0), entry("no spaces!")],
)
def test_a_file_that_is_no_list_of_keys_is_named(path, text):
    path.write_text(text)
    with pytest.raises(ValueError, match=r"keys\.yaml: "):
        Keys(path)
    path.unlink()
    with pytest.raises(ValueError, match="No such file"):
        Keys(path)


def let_in(caller):
    """Say whether it is let in now."""
    try:
        with caller.admitted():
            return True
    except OverloadedError:
        return False


def test_tokens_come_back_within_a_minute():
    now = [5.0]
    key = Key(name="a", sha256="0" * 64, tokens_per_minute=30)
    caller = Caller(key, clock=lambda: now[0])
    caller.charge(29)
    assert let_in(caller)
    caller.charge(1)
    assert not let_in(caller)
    caller.charge(10)
    with pytest.raises(OverloadedError) as refused, caller.admitted():
        pass
    assert refused.value.retry_after_seconds == 22  # until 29 are spent, at half a token a second
    now[0] += 19
    assert not let_in(caller)
    now[0] += 3
    assert let_in(caller)
    now[0] += 3600  # an hour without a request saves nothing up
    caller.charge(29)
    assert let_in(caller)
    caller.charge(1)
    assert not let_in(caller)


def test_what_was_used_without_a_limit_counts_against_none_that_is_set_later():
    free, limited = (Key(name="a", sha256="0" * 64, tokens_per_minute=each) for each in (None, 60))
    caller = Caller(free, clock=lambda: 0.0)
    caller.charge(100_000)
    caller.key = limited
    with caller.admitted():
        caller.charge(80)
    with pytest.raises(OverloadedError), caller.admitted():
        pass
    caller.key = free
    with caller.admitted():
        caller.charge(80)
    caller.key = limited
    with caller.admitted():
        pass


def test_the_requests_of_a_key_are_counted_while_they_run():
    caller = Caller(Key(name="a", sha256="0" * 64, requests_at_once=2))
    with caller.admitted():
        assert let_in(caller)
        with caller.admitted():
            with pytest.raises(OverloadedError, match="2 requests") as refused, caller.admitted():
                pass
            assert refused.value.retry_after_seconds == 1
        with pytest.raises(ZeroDivisionError), caller.admitted():
            raise ZeroDivisionError
        assert let_in(caller)


@pytest.mark.parametrize("text", ["", "two words", "line\nline", "k\u00e9y"])
def test_a_file_that_is_no_key_is_named(tmp_path, text):
    file = tmp_path / "own.key"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"own\.key: must hold one key"):
        follow_key(file)


def test_a_key_is_read_again_when_it_changes(tmp_path):
    file = tmp_path / "own.key"
    file.write_text("first\n")
    key = follow_key(file)
    assert key() == "first"
    rewrite(file, "second")
    assert key() == "second"
    file.unlink()
    assert key() == "second"


def test_only_text_says_who_calls():
    assert authorization_of((("authorization", "Bearer x"),)) == "Bearer x"
    assert authorization_of((("authorization-bin", b"Bearer x"), ("x", "y"))) == ""
    assert authorization_of(None) == ""
