"""Certificates that are renewed while a gateway runs: its orchestrators', and both of its own."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import AsyncExitStack

import grpc
import pytest

from paceline import Client, Tls
from paceline.connection import AsyncConnection
from paceline.errors import ConnectionLostError
from paceline_gateway.fleet import health_watch
from paceline_gateway.fleet.orchestrators import Orchestrators
from paceline_gateway.settings import GatewaySettings
from support.certificates import CLIENT, Certificates
from support.fake_orchestrator import FakeOrchestrator, serving
from support.gateway import gateway_over
from support.waiting import until


@pytest.fixture
def authorities(tmp_path):
    """Return the first authority, and the one that issues whatever is renewed."""
    folders = [tmp_path / "old", tmp_path / "new"]
    for folder in folders:
        folder.mkdir()
    return [Certificates(folder) for folder in folders]


async def shown(address, *, trusting):
    """Return whether a new connection shows a certificate of this authority."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=trusting.authority)
    try:
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    except ssl.SSLCertVerificationError:
        return False
    writer.close()
    return True


async def test_a_renewed_certificate_is_shown_from_the_next_connection_on(authorities, caplog):
    old, new = authorities
    files = old.issue("127.0.0.1")
    settings = {"tls_certificate": files.certificate, "tls_key": files.key}
    async with gateway_over(**settings) as gateway:
        address = gateway.process.addresses["address"]
        assert await shown(address, trusting=old)
        renewed = new.issue("127.0.0.1")
        files.certificate.write_bytes(renewed.certificate.read_bytes())  # not yet its key
        assert await shown(address, trusting=old)
        assert await shown(address, trusting=old)
        assert caplog.text.count("the contents read before stay in use") == 1
        files.key.write_bytes(renewed.key.read_bytes())
        assert not await shown(address, trusting=old)
        assert await shown(address, trusting=new)


def mutual(files):
    """Return an orchestrator's credentials, for those whom its authority has issued one."""
    return grpc.ssl_server_credentials(
        [(files.key.read_bytes(), files.certificate.read_bytes())],
        root_certificates=files.authority.read_bytes(),
        require_client_auth=True,
    )


async def test_a_gateway_goes_on_with_certificates_renewed_after_the_orchestrators(
    authorities, monkeypatch
):
    monkeypatch.setattr(health_watch, "_APPROACH_SECONDS", 0.5)
    approaches, open_channel = [], AsyncConnection.open_channel
    monkeypatch.setattr(
        AsyncConnection, "open_channel", lambda it: approaches.append(None) or open_channel(it)
    )
    old, new = authorities
    own, fake = old.issue(CLIENT), FakeOrchestrator()
    tls = Tls(ca_file=own.authority, certificate_file=own.certificate, key_file=own.key)
    async with AsyncExitStack() as stack:
        async with serving(fake, mutual(old.issue("127.0.0.1"))):
            asked = await stack.enter_async_context(
                Orchestrators([fake.address], tls=tls, insecure=False)
            )
            await asked.until_one_serves()
            await asked.client.info()
        await stack.enter_async_context(serving(fake, mutual(new.issue("127.0.0.1"))))
        seen = len(approaches)
        await until(
            lambda: len(approaches) > seen + 1, what="it is approached in vain", within_seconds=20
        )
        with pytest.raises(ConnectionLostError):
            await asked.client.info()
        new.replace(own, CLIENT)
        await until(lambda: asked.any_serves, what="it is found again")
        await asked.info()  # asks twice where a connection is lost


async def test_a_blocking_client_goes_on_with_renewed_certificates(authorities):
    old, new = authorities
    own, fake = old.issue(CLIENT), FakeOrchestrator()
    tls = Tls(ca_file=own.authority, certificate_file=own.certificate, key_file=own.key)
    async with serving(fake, mutual(old.issue("127.0.0.1"))):
        pass
    with Client(fake.address, tls=tls) as client:
        async with serving(fake, mutual(new.issue("127.0.0.1"))):
            with pytest.raises(ConnectionLostError):
                await asyncio.to_thread(client.info)
            new.replace(own, CLIENT)
            with pytest.raises(ConnectionLostError):
                await asyncio.to_thread(client.info)
            assert (await asyncio.to_thread(client.info)).model_name == "fake"


def test_the_name_in_the_orchestrators_certificate_can_be_another_than_the_addresss(tmp_path):
    name = {
        "orchestrators": "pods.example:50050",
        "orchestrator_tls_server_name": "orchestrator.example",
    }
    authority = {"orchestrator_tls_authority": tmp_path / "ca.crt"}
    tls = GatewaySettings(**name, **authority).orchestrator_tls
    assert tls.server_name == "orchestrator.example"
    with pytest.raises(ValueError, match="needs --orchestrator-tls-authority"):
        GatewaySettings(**name, insecure=True)
