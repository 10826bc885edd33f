"""Whose a request is, as far as its connection tells."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline_orchestrator.front.identity import share_of
from paceline_serving.keys import Caller, Key


def context(peer, **certificate):
    return SimpleNamespace(peer=lambda: peer, auth_context=lambda: certificate)


def test_connections_from_one_address_are_one_client():
    assert share_of(context("ipv4:10.0.0.1:50000")) == share_of(context("ipv4:10.0.0.1:50001"))
    assert share_of(context("ipv6:[::1]:50000")) == share_of(context("ipv6:[::1]:50001"))
    assert share_of(context("unix:/a")) != share_of(context("unix:/b"))


def test_one_network_of_ipv6_is_one_client():
    here = share_of(context("ipv6:[2001:db8::1]:50000"))
    assert here == share_of(context("ipv6:[2001:db8::ffff]:1"))
    assert here == share_of(context("ipv6:%5B2001:db8::1%5D:50000"))
    assert here != share_of(context("ipv6:[2001:db8:0:1::1]:50000"))
    assert share_of(context("ipv6:[fe80::1%25eth0]:50000"))


def test_a_client_of_ipv4_is_the_same_at_a_socket_for_both_kinds():
    here = share_of(context("ipv6:[::ffff:10.0.0.1]:50000"))
    assert here == share_of(context("ipv4:10.0.0.1:50000"))
    assert here != share_of(context("ipv6:[::ffff:10.0.0.2]:50000"))


def test_other_addresses_are_other_clients():
    assert share_of(context("ipv4:10.0.0.1:50000")) != share_of(context("ipv4:10.0.0.2:50000"))


@pytest.mark.parametrize("name", ["peer_spiffe_id", "x509_common_name"])
def test_a_certificate_is_who_the_client_is_wherever_it_comes_from(name):
    here = context("ipv4:10.0.0.1:50000", **{name: [b"me"]})
    there = context("ipv4:10.0.0.2:50000", **{name: [b"me"]})
    other = context("ipv4:10.0.0.1:50000", **{name: [b"you"]})
    assert share_of(here) == share_of(there) != share_of(other)


def test_the_name_given_on_is_short_and_tells_nothing():
    share = share_of(context("ipv4:10.0.0.1:50000", peer_spiffe_id=[b"spiffe://me"]))
    assert share.isalnum()
    assert len(share) == 16


def test_a_key_is_who_the_client_is_unless_a_certificate_says_so():
    here, there = context("ipv4:10.0.0.1:50000"), context("ipv4:10.0.0.2:50000")
    shown = context("ipv4:10.0.0.1:50000", x509_common_name=[b"me"])
    alice, bob = (Caller(Key(name=name, sha256="0" * 64)) for name in ("alice", "bob"))
    assert share_of(here, alice) == share_of(there, alice) != share_of(here, bob)
    assert share_of(shown, alice) == share_of(shown, bob) == share_of(shown)


def test_a_key_cannot_be_named_after_an_address():
    named = Caller(Key(name="10.0.0.1", sha256="0" * 64))
    there = context("ipv4:10.0.0.2:50000")
    assert share_of(there, named) != share_of(context("ipv4:10.0.0.1:50000"))
