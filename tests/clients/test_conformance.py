"""Every client answers every case of tests/contract/vectors/clients alike."""

from __future__ import annotations

from itertools import pairwise

import pytest

from support.conformance.cases import all_cases, with_references
from support.conformance.matching import differences

# A case fails beyond them. What must be prompt would take the call's whole 120 s if it were not.
LIMITS_SECONDS = {"unary": 30.0, "streaming": 60.0, "prompt": 30.0}
NOT_EXPECTED = {"error": None, "cancelled": False, "resumed": None}
WAYS_TO_BE_CANCELLED = {"$in": [None, {"kind": "ClientCancelled"}]}


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: f"{case.group}: {case.name}")
def test_the_client_answers_as_every_other(driver, case, stage, words):
    answers, clients = [], set()
    try:
        for step in case.steps:
            if "request" not in step:
                (stage.restart if "restart" in step else stage.drain)()
                continue
            request = prepared(with_references(step["request"], answers), stage, words)
            request["case"] = case.name
            clients.add(request["client"])
            answer = driver.ask(request, within_seconds=LIMITS_SECONDS[case.timing])
            if case.needs and "unsupported" in answer:
                pytest.skip(f"not here: {case.needs}")
            assert "unsupported" not in answer, answer["unsupported"]
            answers.append(with_joined_lists(answer))
            expected = with_references(step["answer"], answers)
            assert not differences(with_defaults(expected), answers[-1])
            check_what_always_holds(answer)
        # Before the clients are closed, which ends everything: a cancel has to arrive without that.
        saw = stage.saw()
    finally:
        for client in clients:
            driver.ask({"do": "close", "client": client}, within_seconds=60)
    assert not differences(with_references(case.servers_saw, answers), saw, at="servers")


def prepared(request, stage, words):
    """Fill in the client, the address, and what stands for the words with a $."""
    words = {**words, **stage.addresses}
    request = {"client": "a", "address": stage.address, **request}
    request["address"] = words.get(request["address"], request["address"])
    if "addresses" in request:
        del request["address"]
        request["addresses"] = [words.get(each, each) for each in request["addresses"]]
    if "tls" in request:
        request["tls"] = {key: words.get(path, path) for key, path in request["tls"].items()}
    return request


def with_defaults(expected):
    """Expect no error, no cancel and no resumption where nothing is said of them."""
    if expected.get("cancelled") is True:
        expected = {"error": WAYS_TO_BE_CANCELLED, **expected}
    return {**NOT_EXPECTED, **expected}


def with_joined_lists(answer):
    """Add what all chunks say together: how tokens fall into chunks is a matter of time."""
    for part in (answer, answer.get("resumed")):
        for name in ("token_ids", "origins", "logprobs"):
            if part is not None:
                part[name] = [each for chunk in part["chunks"] for each in chunk[name]]
    resumed = answer.get("resumed")
    answer["whole_text"] = answer["text"] + (resumed["text"] if resumed else "")
    return answer


def check_what_always_holds(answer):
    """Chunks follow on one another, and their texts are the text."""
    for part in (answer, answer.get("resumed")):
        chunks = part["chunks"] if part else []
        assert "".join(chunk["text"] for chunk in chunks) == (part["text"] if part else "")
        for one, next_one in pairwise(chunks):
            assert one["position"] + len(one["token_ids"]) == next_one["position"]
