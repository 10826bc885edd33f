"""EndpointSlices, read: which pods there are, and what they may be used for."""

from __future__ import annotations

import pytest

from paceline_orchestrator.fleet.discovery import Availability, Role, Service
from paceline_orchestrator.fleet.discovery.slices import SERVICE_LABEL, read_slices

TARGETS = Service("target", Role.TARGET)
DRAFTERS = Service("drafter", Role.DRAFTER)


def a_slice(*endpoints, service="target", ports=({"name": "grpc", "port": 50051},)):
    metadata = {"namespace": "here", "labels": {SERVICE_LABEL: service}}
    return {"metadata": metadata, "endpoints": list(endpoints), "ports": list(ports)}


def a_pod(uid, *, address="10.0.0.1", **conditions):
    pod = {"kind": "Pod", "name": f"pod-{uid}", "uid": uid}
    return {"addresses": [address], "conditions": conditions, "targetRef": pod}


def read(*slices, services=(TARGETS,)):
    return {it.uid or it.address: it for it in read_slices(slices, services=services)}


def test_a_pod_is_known_by_its_uid_and_its_service_tells_role_and_certificate():
    found = read(
        a_slice(a_pod("t", ready=True)),
        a_slice(a_pod("d", ready=True, address="10.0.0.2"), service="drafter"),
        a_slice(a_pod("x", ready=True), service="somebody-else"),
        services=(TARGETS, DRAFTERS),
    )
    assert found.keys() == {"t", "d"}
    assert (found["d"].role, found["d"].name) == (Role.DRAFTER, "pod-d")
    assert found["t"].address == "10.0.0.1:50051"
    assert found["t"].tls_name == "target.here.svc"


@pytest.mark.parametrize(
    ("conditions", "availability"),
    [
        ({"ready": True, "serving": True, "terminating": False}, Availability.READY),
        ({}, Availability.READY),
        ({"ready": None, "serving": None, "terminating": None}, Availability.READY),
        ({"ready": False, "serving": False, "terminating": False}, Availability.NOT_READY),
        ({"ready": False, "serving": True, "terminating": True}, Availability.TERMINATING),
        ({"ready": False, "serving": False, "terminating": True}, Availability.TERMINATING),
        ({"ready": True, "serving": True, "terminating": True}, Availability.TERMINATING),
    ],
)
def test_conditions_say_what_a_pod_may_be_used_for(conditions, availability):
    assert read(a_slice(a_pod("t", **conditions)))["t"].availability is availability


def test_a_pod_in_two_slices_is_one_server_and_the_later_state_counts():
    moving = [a_slice(a_pod("t", ready=True)), a_slice(a_pod("t", terminating=True))]
    for slices in (moving, moving[::-1]):
        assert read(*slices)["t"].availability is Availability.TERMINATING
    starting = [a_slice(a_pod("t", ready=False)), a_slice(a_pod("t", ready=True))]
    for slices in (starting, starting[::-1]):
        assert read(*slices)["t"].availability is Availability.READY


def test_a_pod_with_two_address_families_is_one_server_on_ipv4():
    found = read(a_slice(a_pod("t", address="fd00::7")), a_slice(a_pod("t", address="10.0.0.9")))
    assert found["t"].address == "10.0.0.9:50051"
    assert read(a_slice(a_pod("t", address="fd00::7")))["t"].address == "[fd00::7]:50051"


@pytest.mark.parametrize(
    ("ports", "port", "address"),
    [
        ([{"name": "metrics", "port": 9}, {"name": "grpc", "port": 7}], None, "10.0.0.1:7"),
        ([{"name": "", "port": 8}], None, "10.0.0.1:8"),
        ([{"port": 8}], None, "10.0.0.1:8"),
        ([{"name": "metrics", "port": 9}, {"name": "grpc", "port": 7}], 6, "10.0.0.1:6"),
        ([], 6, "10.0.0.1:6"),
    ],
)
def test_the_port_is_the_given_one_or_the_one_named_grpc_or_the_only_one(ports, port, address):
    services = (Service("target", Role.TARGET, port),)
    assert read(a_slice(a_pod("t"), ports=ports), services=services)["t"].address == address


@pytest.mark.parametrize(
    "each",
    [
        a_slice(a_pod("t"), ports=()),
        a_slice(a_pod("t"), ports=[{"name": "a", "port": 1}, {"name": "b", "port": 2}]),
        a_slice({"addresses": [], "targetRef": {"uid": "t"}}),
        {"metadata": {"labels": {SERVICE_LABEL: "target"}}, "endpoints": None, "ports": None},
        {"metadata": {}},
    ],
)
def test_what_cannot_be_reached_is_left_out(each):
    assert read(each) == {}


def test_an_endpoint_without_a_pod_is_known_by_its_address():
    found = read(a_slice({"addresses": ["10.0.0.1"]}))
    assert found["10.0.0.1:50051"].name == "10.0.0.1:50051"


@pytest.mark.parametrize("conditions", [None, {}, {"ready": None}])
@pytest.mark.parametrize("pod", [None, {}, {"kind": "Pod"}])
def test_an_endpoint_of_which_nothing_is_said_but_its_address_is_a_server(conditions, pod):
    found = read(a_slice({"addresses": ["10.0.0.1"], "conditions": conditions, "targetRef": pod}))
    (endpoint,) = found.values()
    assert endpoint.address == endpoint.name == "10.0.0.1:50051"
    assert endpoint.availability is Availability.READY


def test_an_ipv6_slice_alone_is_called_in_brackets_whoever_is_behind_it():
    found = read(a_slice({"addresses": ["fd00::7"]}, a_pod("t", address="fd00::8")))
    assert {it.address for it in found.values()} == {"[fd00::7]:50051", "[fd00::8]:50051"}


def test_the_same_address_without_a_pod_in_two_slices_is_one_server():
    bare = {"addresses": ["10.0.0.1"], "conditions": {"ready": False}}
    (endpoint,) = read(a_slice(bare), a_slice({**bare, "conditions": {}})).values()
    assert endpoint.availability is Availability.READY


def test_a_slice_without_labels_or_namespace_is_read_as_far_as_it_goes():
    each = a_slice(a_pod("t"))
    del each["metadata"]["namespace"]
    assert read(each)["t"].tls_name == "target.default.svc"
    assert read({**each, "metadata": {"labels": None}}) == {}
