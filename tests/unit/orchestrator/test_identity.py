"""Whose a request is, as far as its connection tells."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline_orchestrator.front.identity import share_of


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
