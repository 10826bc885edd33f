"""Keys: who has one may call, within its limits; the file is followed; nothing tells of them."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest

from paceline.errors import OverloadedError, UnauthenticatedError
from paceline_serving.keys import (
    Caller,
    Key,
    Keys,
    authorization_of,
    counted_reason,
    follow_key,
)
from paceline_serving.plain_yaml import parse_yaml
from support.keys import SECRET, entry, rewrite


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(entry())
    return file


@pytest.mark.parametrize(
    "header",
    [
        *("", SECRET, f"Basic {SECRET}", "Bearer", "Bearer ", f"Bearer {SECRET}x", "Bearer \xff"),
        *(f"Bearer {SECRET[:-1]}", f"Bearer {SECRET[1:]}", f"Bearer {SECRET.upper()}"),
        *(f"Bearer Bearer {SECRET}", f"Bearer {SECRET},{SECRET}", f"Bearer {SECRET} {SECRET}"),
        *(f"Bearer {SECRET}\0", f"Bearers {SECRET}", f"Bearer\t{SECRET}", f"Bear {SECRET}"),
    ],
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
    assert "stay in use" in caplog.text
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
    assert counted_reason(refused.value) == "KEY_LIMIT"
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


def test_a_key_is_found_as_fast_among_twenty_thousand_as_alone(path):
    """Each request asks for it on the event loop. To look at each entry takes milliseconds."""
    others = "".join(entry(f"n{it}", f"other {it}") for it in range(20_000))
    rewrite(path, others + entry())
    keys, taken = Keys(path), []
    for _ in range(5):
        began = time.thread_time()
        assert keys.find(f"Bearer {SECRET}").key.name == "alice"
        taken.append(time.thread_time() - began)
    assert min(taken) < 0.001


def test_the_requests_of_a_key_are_counted_while_they_run():
    caller = Caller(Key(name="a", sha256="0" * 64, requests_at_once=2))
    with caller.admitted():
        assert let_in(caller)
        with caller.admitted():
            with pytest.raises(OverloadedError, match="2 requests") as refused, caller.admitted():
                pass
            assert refused.value.retry_after_seconds == 1
            assert counted_reason(refused.value) == "KEY_LIMIT"
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


def many(count):
    """Return the text of a file with so many keys besides alice's."""
    line = entry("other", "other").replace("name: other", "name: k{}")
    return entry() + "".join(line.format(index) for index in range(count))


def test_a_large_file_is_read_off_the_callers_thread_and_the_old_keys_hold_until_then(
    path, monkeypatch
):
    keys = Keys(path)
    readers, has_begun, may_read = [], threading.Event(), threading.Event()

    def slow(text):
        readers.append(threading.current_thread())
        has_begun.set()
        assert may_read.wait(30)
        return parse_yaml(text)

    monkeypatch.setattr("paceline_serving.keys.parse_yaml", slow)
    rewrite(path, many(200).replace("alice", "anna"))
    assert keys.find(f"Bearer {SECRET}").key.name == "alice"
    assert keys.find(f"Bearer {SECRET}").key.name == "alice"
    assert has_begun.wait(30)
    may_read.set()
    readers[0].join(30)
    assert keys.find(f"Bearer {SECRET}").key.name == "anna"
    assert len(readers) == 1
    assert readers[0] is not threading.current_thread()


@pytest.mark.parametrize("is_flow", [True, False])
def test_a_file_that_is_nested_deeply_is_refused_and_the_old_keys_hold(path, caplog, is_flow):
    keys = Keys(path)
    depth = 5000
    rewrite(path, "[" * depth + "]" * depth if is_flow else "- " * depth + "a")
    assert keys.find(f"Bearer {SECRET}").key.name == "alice"
    assert "nested more than 32 levels deep" in caplog.text


def test_a_pipe_or_a_device_in_the_place_of_the_file_leaves_the_old_keys(path, caplog):
    keys = Keys(path)
    path.unlink()
    os.mkfifo(path)
    assert keys.find(f"Bearer {SECRET}").key.name == "alice"
    assert "keys.yaml: is not a regular file" in caplog.text
    path.unlink()
    path.symlink_to("/dev/zero")
    assert keys.find(f"Bearer {SECRET}").key.name == "alice"
    assert caplog.text.count("is not a regular file") == 2


def test_a_key_file_that_is_a_pipe_is_refused_at_the_start(path, tmp_path):
    for made, use in ((Keys, "keys.pipe"), (follow_key, "own.pipe")):
        os.mkfifo(tmp_path / use)
        with pytest.raises(ValueError, match="is not a regular file"):
            made(tmp_path / use)


def test_more_keys_than_any_service_has_are_refused_by_the_files_size(path):
    with path.open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"keys\.yaml: has more than 4194304 bytes"):
        Keys(path)


@pytest.mark.parametrize("second", ["Bearer x", "Bearer y", b"Bearer x"])
def test_two_keys_in_one_call_are_none(second):
    with pytest.raises(UnauthenticatedError, match="more than one"):
        authorization_of((("authorization", "Bearer x"), ("authorization", second)))


@pytest.mark.parametrize("want", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_key_that_changes_while_there_are_no_descriptors_is_read_when_there_are(
    path, want, monkeypatch
):
    keys = Keys(path)
    rewrite(path, entry("bob", "another key"))

    def fails(*_, **__):
        raise OSError(want, "there are none")

    with monkeypatch.context() as without:
        without.setattr("paceline_serving.keys.read_plain_file", fails)
        assert keys.find(f"Bearer {SECRET}").key.name == "alice"
    assert keys.find("Bearer another key").key.name == "bob"
    with pytest.raises(UnauthenticatedError):
        keys.find(f"Bearer {SECRET}")
