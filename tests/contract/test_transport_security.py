"""TLS, mTLS and roles, on a target with the whole chain."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.errors import ConnectionLostError, PermissionDeniedError, SessionNotFoundError
from paceline_serving.security import (
    AccessPolicy,
    TlsFiles,
    channel_credentials,
    refuse_plaintext,
    server_credentials,
)
from paceline_serving.transport import pod_channel
from support.certificates import CLIENT, ORCHESTRATOR, Certificates
from support.fake_host import FakeHost
from support.model_servers import TARGET, ModelClient, serving


@pytest.fixture
def certificates(tmp_path) -> Certificates:
    return Certificates(tmp_path)


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


async def ask(process, files: TlsFiles | None) -> str:
    """Return the model's name, as a peer with these files."""
    client = ModelClient(
        TARGET, process.addresses["address"], credentials=channel_credentials(files)
    )
    try:
        return (await client.learn()).info.model_name
    finally:
        await client.channel.close()


async def test_a_tls_server_answers_whoever_trusts_it_and_nobody_in_plaintext(certificates):
    settings = server_settings(certificates.issue("localhost"), mutual=False)
    async with serving(TARGET, FakeHost(), **settings) as process:
        assert await ask(process, TlsFiles(authority=certificates.authority)) == "fake"
        with pytest.raises(ConnectionLostError):
            await ask(process, None)


async def test_a_client_refuses_a_server_of_another_authority(certificates, tmp_path):
    settings = server_settings(certificates.issue("localhost"), mutual=False)
    (tmp_path / "other").mkdir()
    other = Certificates(tmp_path / "other")
    async with serving(TARGET, FakeHost(), **settings) as process:
        with pytest.raises(ConnectionLostError):
            await ask(process, TlsFiles(authority=other.authority))


async def test_with_mtls_the_role_in_the_certificate_decides(certificates):
    settings = server_settings(certificates.issue("localhost"), mutual=True)
    async with serving(TARGET, FakeHost(), **settings) as process:
        assert await ask(process, certificates.issue(ORCHESTRATOR)) == "fake"
        for stranger in (CLIENT, "spiffe://paceline/nobody", "orchestrator.invalid"):
            with pytest.raises(PermissionDeniedError):
                await ask(process, certificates.issue(stranger))


async def test_with_mtls_nobody_without_a_certificate_gets_past_the_handshake(certificates):
    settings = server_settings(certificates.issue("localhost"), mutual=True)
    async with serving(TARGET, FakeHost(), **settings) as process:
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
    async with serving(TARGET, FakeHost(), **settings) as process:
        assert ("--peer-roles" in caplog.text) == (not roles)
        if not roles:
            assert await ask(process, certificates.issue("spiffe://paceline/nobody")) == "fake"


@pytest.mark.parametrize(
    ("owner", "stranger"),
    [("spiffe://paceline/a", "spiffe://paceline/b"), ("a.invalid", "b.invalid")],
)
async def test_a_session_is_not_found_by_another_certificate(certificates, owner, stranger):
    settings = server_settings(certificates.issue("localhost"), mutual=True) | {"peer_roles": ()}
    async with serving(TARGET, FakeHost(), **settings) as process:
        own, own_renewed, other = [
            await ModelClient(
                TARGET,
                process.addresses["address"],
                credentials=channel_credentials(certificates.issue(name)),
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


async def test_a_renewed_certificate_is_used_without_a_restart(certificates, tmp_path):
    files = certificates.issue("localhost")
    (tmp_path / "new").mkdir()
    renewed_authority = Certificates(tmp_path / "new")
    async with serving(TARGET, FakeHost(), **server_settings(files, mutual=False)) as process:
        assert await ask(process, TlsFiles(authority=certificates.authority)) == "fake"
        renewed = renewed_authority.issue("localhost")
        files.certificate.write_bytes(renewed.certificate.read_bytes())
        files.key.write_bytes(renewed.key.read_bytes())
        assert await ask(process, TlsFiles(authority=renewed_authority.authority)) == "fake"


async def test_health_on_its_own_port_needs_no_certificate(certificates):
    settings = server_settings(certificates.issue("localhost"), mutual=True)
    async with (
        serving(TARGET, FakeHost(), **settings) as process,
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


def test_a_service_without_a_row_cannot_be_served():
    with pytest.raises(ValueError, match="has no row"):
        AccessPolicy.require_known(["paceline.v1.TargetService", "paceline.v1.New"])


def test_plaintext_to_another_machine_is_refused():
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/tmp/x"):
        refuse_plaintext(address, flag="--insecure")
    for address in ("10.0.0.1:1", "target-0:50051", "0.0.0.0:1", "[::]:1", "localhost.evil:1"):
        with pytest.raises(ValueError, match="--insecure"):
            refuse_plaintext(address, flag="--insecure")


def test_no_certificate_is_plaintext():
    assert server_credentials(TlsFiles()) is None
    assert channel_credentials(None) is None


async def test_a_pod_is_called_by_its_address_and_known_by_its_services_name(certificates):
    name = "target.paceline.svc"
    settings = {**server_settings(certificates.issue(name), mutual=False), "listen": "127.0.0.1:0"}
    credentials = channel_credentials(TlsFiles(authority=certificates.authority))
    async with serving(TARGET, FakeHost(), **settings) as process:
        address = process.addresses["address"]
        channel = pod_channel(address, credentials=credentials, tls_name=name)
        request = health_pb2.HealthCheckRequest()
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await channel.close(None)
        with pytest.raises(ConnectionLostError):
            await ask(process, TlsFiles(authority=certificates.authority))
