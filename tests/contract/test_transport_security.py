"""TLS, mTLS and roles, on a target with the whole chain."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.errors import ConnectionLostError, PermissionDeniedError, SessionNotFoundError
from paceline_orchestrator.decoding import probe
from paceline_orchestrator.fleet import health_watch
from paceline_orchestrator.fleet.discovery import Endpoint, Role, StaticDiscovery
from paceline_orchestrator.fleet.pool import ServerPool
from paceline_serving.renewed_channel import RenewedChannel
from paceline_serving.security import (
    AccessPolicy,
    TlsFiles,
    channel_credentials,
    refuse_plaintext,
    server_credentials,
)
from paceline_serving.transport import pod_channel
from support.certificates import CLIENT, ORCHESTRATOR, Certificates
from support.model_contract import a_host
from support.model_servers import TARGET, ModelClient, serving
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def certificates(tmp_path) -> Certificates:
    return Certificates(tmp_path)


@pytest.fixture
def renewed_authority(tmp_path) -> Certificates:
    """Return the one that issues whatever is renewed."""
    (tmp_path / "new").mkdir()
    return Certificates(tmp_path / "new")


class LeavingChannel:
    """Stands for a channel whose server is ending its connection."""

    is_closed = False
    state = grpc.ChannelConnectivity.READY

    def get_state(self) -> grpc.ChannelConnectivity:
        return self.state

    def unary_unary(self, _method: str) -> Any:
        return lambda: self

    async def close(self, _grace: float | None) -> None:
        self.is_closed = True


@pytest.fixture
async def closing() -> AsyncIterator[AsyncExitStack]:
    """Close what a test opens, however it ends."""
    async with AsyncExitStack() as stack:
        yield stack


def server_settings(files: TlsFiles, *, mutual: bool) -> dict[str, object]:
    settings: dict[str, object] = {
        "listen": "localhost:0",
        "tls_certificate": files.certificate,
        "tls_key": files.key,
    }
    if mutual:
        settings["tls_client_authority"] = files.authority
        settings["peer_roles"] = (f"{ORCHESTRATOR}=orchestrator", f"{CLIENT}=client")
    return settings


def credentials(files: TlsFiles | None) -> grpc.ChannelCredentials | None:
    """Return what gRPC takes."""
    followed = channel_credentials(files)
    return followed.current() if followed is not None else None


def count_calls(monkeypatch, owner: Any, name: str) -> list[None]:
    """Return a list that grows with each call of a function."""
    calls: list[None] = []
    called = getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(None)
        return called(*args, **options)

    monkeypatch.setattr(owner, name, counted)
    return calls


async def health(channel: grpc.aio.Channel) -> int:
    """Ask a server, as soon as it is there, how it is."""
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest()
    return (await stub.Check(request, timeout=20, wait_for_ready=True)).status


async def ask(process, files: TlsFiles | None) -> str:
    """Return the model's name, as a peer with these files."""
    client = ModelClient(TARGET, process.addresses["address"], credentials=credentials(files))
    try:
        return (await client.learn()).info.model_name
    finally:
        await client.channel.close()


async def test_a_tls_server_answers_whoever_trusts_it_and_nobody_in_plaintext(certificates):
    settings = server_settings(certificates.issue("localhost"), mutual=False)
    async with serving(TARGET, a_host(), **settings) as process:
        assert await ask(process, TlsFiles(authority=certificates.authority)) == "simulated"
        with pytest.raises(ConnectionLostError):
            await ask(process, None)


async def test_a_client_refuses_a_server_of_another_authority(certificates, tmp_path):
    settings = server_settings(certificates.issue("localhost"), mutual=False)
    (tmp_path / "other").mkdir()
    other = Certificates(tmp_path / "other")
    async with serving(TARGET, a_host(), **settings) as process:
        with pytest.raises(ConnectionLostError):
            await ask(process, TlsFiles(authority=other.authority))


async def test_with_mtls_the_role_in_the_certificate_decides(certificates):
    settings = server_settings(certificates.issue("localhost"), mutual=True)
    async with serving(TARGET, a_host(), **settings) as process:
        assert await ask(process, certificates.issue(ORCHESTRATOR)) == "simulated"
        for stranger in (CLIENT, "spiffe://paceline/nobody", "orchestrator.invalid"):
            with pytest.raises(PermissionDeniedError):
                await ask(process, certificates.issue(stranger))


async def test_with_mtls_nobody_without_a_certificate_gets_past_the_handshake(certificates):
    settings = server_settings(certificates.issue("localhost"), mutual=True)
    async with serving(TARGET, a_host(), **settings) as process:
        for files in (TlsFiles(authority=certificates.authority), None):
            with pytest.raises(ConnectionLostError):
                await ask(process, files)


@pytest.mark.parametrize("roles", [True, False])
async def test_with_mtls_and_no_roles_every_client_certificate_may_call(
    certificates, caplog, roles
):
    settings = server_settings(certificates.issue("localhost"), mutual=True)
    if not roles:
        settings["peer_roles"] = ()
    async with serving(TARGET, a_host(), **settings) as process:
        assert ("--peer-roles" in caplog.text) == (not roles)
        if not roles:
            assert await ask(process, certificates.issue("spiffe://paceline/nobody")) == "simulated"


@pytest.mark.parametrize(
    ("owner", "stranger"),
    [("spiffe://paceline/a", "spiffe://paceline/b"), ("a.invalid", "b.invalid")],
)
async def test_a_session_is_not_found_by_another_certificate(certificates, owner, stranger):
    settings = server_settings(certificates.issue("localhost"), mutual=True) | {"peer_roles": ()}
    async with serving(TARGET, a_host(), **settings) as process:
        own, own_renewed, other = [
            await ModelClient(
                TARGET,
                process.addresses["address"],
                credentials=credentials(certificates.issue(name)),
            ).learn()
            for name in (owner, owner, stranger)
        ]
        session = await own.open()
        for call in (other.verify(other.call(session, 1, new=(5,))), other.renew(session)):
            assert isinstance(await other.error_of(call), SessionNotFoundError)
        await other.close(session)
        await own.verify(own.call(session, 1, new=(5,)))
        await own_renewed.verify(own.call(session, 2, new=(5,)))
        assert await own_renewed.renew(session) > 0
        await own_renewed.close(session)
        for client in (own, own_renewed, other):
            await client.channel.close()


async def test_a_renewed_certificate_is_used_without_a_restart(certificates, renewed_authority):
    files = certificates.issue("localhost")
    async with serving(TARGET, a_host(), **server_settings(files, mutual=False)) as process:
        assert await ask(process, TlsFiles(authority=certificates.authority)) == "simulated"
        renewed = renewed_authority.issue("localhost")
        files.certificate.write_bytes(renewed.certificate.read_bytes())
        files.key.write_bytes(renewed.key.read_bytes())
        assert await ask(process, TlsFiles(authority=renewed_authority.authority)) == "simulated"


async def test_in_three_steps_another_authority_takes_over_and_every_call_is_answered(
    certificates, renewed_authority
):
    server, caller = certificates.issue("localhost"), certificates.issue(ORCHESTRATOR)
    old, new = (it.authority.read_bytes() for it in (certificates, renewed_authority))
    # Each has authorities of its own, since they are not renewed at the same moment.
    trusting = [
        TlsFiles(it.certificate, it.key, it.key.with_suffix(".ca")) for it in (server, caller)
    ]
    for files in trusting:
        files.authority.write_bytes(old)
    async with serving(TARGET, a_host(), **server_settings(trusting[0], mutual=True)) as process:

        async def step(change):
            for files, name in zip(trusting, ("localhost", ORCHESTRATOR), strict=True):
                change(files, name)
                assert await ask(process, trusting[1]) == "simulated"

        def renew(files, name):
            issued = renewed_authority.issue(name)
            files.certificate.write_bytes(issued.certificate.read_bytes())
            files.key.write_bytes(issued.key.read_bytes())

        await step(lambda files, _: files.authority.write_bytes(old + new))
        await step(renew)
        await step(lambda files, _: files.authority.write_bytes(new))
        with pytest.raises(ConnectionLostError):
            await ask(process, certificates.issue(ORCHESTRATOR))


async def test_a_lost_channel_is_replaced_by_one_with_the_renewed_certificates(
    certificates, renewed_authority, closing
):
    own, mine = certificates.issue("localhost"), certificates.issue(ORCHESTRATOR)
    settings = server_settings(own, mutual=True)
    async with serving(TARGET, a_host(), **settings) as process:
        settings["listen"] = process.addresses["address"].replace("127.0.0.1", "localhost")
        channel = pod_channel(settings["listen"], credentials=channel_credentials(mine))
        closing.push_async_callback(channel.close, None)
        assert await health(channel) == SERVING
        renewed_authority.replace(own, "localhost")
        assert await health(channel) == SERVING  # over the connection that there is
    renewed_authority.replace(mine, ORCHESTRATOR)
    async with serving(TARGET, a_host(), **settings):
        assert await health(channel) == SERVING


async def test_what_runs_goes_on_while_its_channel_is_left(certificates, renewed_authority):
    mine = certificates.issue("localhost")
    channels = []

    def open_channel(_credentials):
        channels.append(LeavingChannel())
        return channels[-1]

    channel = RenewedChannel(open_channel, channel_credentials(mine))
    call = channel.unary_unary("/a/B")
    assert call() is channels[0]
    renewed_authority.replace(mine, "localhost")
    assert call() is channels[0]
    channels[0].state = grpc.ChannelConnectivity.IDLE
    assert call() is channels[1]
    await asyncio.sleep(0)
    assert call() is channels[1]
    assert not channels[0].is_closed
    await channel.close()
    assert [it.is_closed for it in channels] == [True, True]


async def test_a_server_is_found_again_though_it_had_its_new_certificate_first(
    certificates, renewed_authority, monkeypatch
):
    monkeypatch.setattr(health_watch, "_APPROACH_SECONDS", 0.2)
    approaches = count_calls(monkeypatch, health_watch, "health_changes")
    own, trust = certificates.issue("127.0.0.1"), TlsFiles(authority=certificates.authority)
    followed = channel_credentials(trust)
    settings = {**server_settings(own, mutual=False), "listen": "127.0.0.1:0"}
    async with AsyncExitStack() as stack:
        async with serving(TARGET, a_host(), **settings) as process:
            settings["listen"] = process.addresses["address"]
            endpoint = Endpoint("target-0", settings["listen"], Role.TARGET)
            pool = await stack.enter_async_context(
                ServerPool(
                    StaticDiscovery((endpoint,)),
                    open_channel=lambda it: pod_channel(it.address, credentials=followed),
                    probe=probe.answers,
                )
            )
            await until(lambda: pool.servers and pool.servers[0].ready, what="it is found")
            renewed = renewed_authority.issue("127.0.0.1")
            settings |= {"tls_certificate": renewed.certificate, "tls_key": renewed.key}
        await stack.enter_async_context(serving(TARGET, a_host(), **settings))
        seen = len(approaches)
        await until(
            lambda: len(approaches) > seen + 1, what="it is approached in vain", within_seconds=20
        )
        certificates.authority.write_bytes(renewed_authority.authority.read_bytes())
        await until(lambda: pool.servers[0].ready, what="it is found again")


async def test_health_on_its_own_port_needs_no_certificate(certificates):
    settings = server_settings(certificates.issue("localhost"), mutual=True)
    async with (
        serving(TARGET, a_host(), **settings) as process,
        grpc.aio.insecure_channel(process.addresses["health_address"]) as channel,
    ):
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"", timeout=60) == b"\x08\x01"  # status: SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await channel.unary_unary("/paceline.v1.TargetService/Verify")(b"", timeout=60)


@pytest.mark.parametrize(
    ("service", "roles"),
    [
        ("paceline.v1.TargetService", {"orchestrator", "operator"}),
        ("paceline.v1.DrafterService", {"orchestrator", "operator"}),
        ("paceline.v1.ModelService", {"orchestrator", "operator"}),
        ("paceline.v1.SessionService", {"orchestrator", "operator"}),
        ("paceline.v1.OrchestratorService", {"client", "operator"}),
        ("grpc.health.v1.Health", {"client", "orchestrator", "operator"}),
        ("paceline.v1.Unheard", set()),
    ],
)
def test_each_role_may_call_what_the_table_says(service, roles):
    for role in ("client", "operator", "orchestrator"):
        policy = AccessPolicy({"spiffe://a/b": role})
        peer = {"peer_spiffe_id": [b"spiffe://a/b"]}
        if role in roles:
            policy.check(service, peer)
        else:
            with pytest.raises(PermissionDeniedError):
                policy.check(service, peer)
        with pytest.raises(PermissionDeniedError):
            policy.check(service, {})


@pytest.mark.parametrize(
    "near",
    [
        *(b"spiffe://a/b/", b"spiffe://a/bb", b"spiffe://a/", b"spiffe://A/b", b"SPIFFE://a/b"),
        *(b"spiffe://a.evil.example/b", b"xspiffe://a/b", b" spiffe://a/b", b"spiffe://a/b\0"),
        *(b"spiffe://a/b,spiffe://c", b"spiffe://a/%62", b"spiffe://a//b", b"spiffe://a/c/../b"),
    ],
)
def test_an_identity_that_nearly_is_one_with_a_role_has_none(near):
    policy = AccessPolicy({"spiffe://a/b": "operator"})
    with pytest.raises(PermissionDeniedError):
        policy.check("paceline.v1.TargetService", {"peer_spiffe_id": [near]})
    named = {"x509_common_name": [b"spiffe://a/b"]}
    with pytest.raises(PermissionDeniedError):
        policy.check("paceline.v1.TargetService", named)


def test_a_service_without_a_row_cannot_be_served():
    with pytest.raises(ValueError, match="has no row"):
        AccessPolicy.require_known(["paceline.v1.TargetService", "paceline.v1.New"])


def test_plaintext_to_another_machine_is_refused():
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/tmp/x"):
        refuse_plaintext(address, flag="--insecure")
    for address in (
        "10.0.0.1:1",
        "target-0:50051",
        "0.0.0.0:1",
        "[::]:1",
        "localhost.evil:1",
        "127.0.0.1.evil:1",
    ):
        with pytest.raises(ValueError, match="--insecure"):
            refuse_plaintext(address, flag="--insecure")


def test_no_certificate_is_plaintext():
    assert server_credentials(TlsFiles()) is None
    assert channel_credentials(None) is None


async def test_a_pod_is_called_by_its_address_and_known_by_its_services_name(certificates):
    name = "target.paceline.svc"
    settings = {**server_settings(certificates.issue(name), mutual=False), "listen": "127.0.0.1:0"}
    followed = channel_credentials(TlsFiles(authority=certificates.authority))
    async with serving(TARGET, a_host(), **settings) as process:
        address = process.addresses["address"]
        channel = pod_channel(address, credentials=followed, tls_name=name)
        request = health_pb2.HealthCheckRequest()
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await channel.close(None)
        with pytest.raises(ConnectionLostError):
            await ask(process, TlsFiles(authority=certificates.authority))
