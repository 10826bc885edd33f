"""A system whose model servers speak TLS or mTLS decodes as any other, and lets no stranger in."""

from __future__ import annotations

from contextlib import suppress

import pytest

from paceline import Client
from paceline.errors import PacelineError, TryAgainError
from support.certificates import CLIENT, ORCHESTRATOR, Certificates
from support.streams import PROMPT, plain
from support.system import System, simulated_model
from support.waiting import eventually

TOKENS = 32


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module", params=["tls", "mtls"])
def secured(request, certificates):
    """A system with TLS between its servers, or with mTLS and roles."""
    own = certificates.issue("127.0.0.1")
    flags = {"tls": True, "tls_certificate": own.certificate, "tls_key": own.key}
    identity = None
    if request.param == "mtls":
        identity = ORCHESTRATOR
        flags["tls_client_authority"] = certificates.authority
        flags["peer_roles"] = f"{ORCHESTRATOR}=orchestrator,{CLIENT}=client"
    system = System(
        drafters=[
            simulated_model("drafter", seconds=0.001, simulated_acceptance_rate=0.8, **flags)
        ],
        targets=[simulated_model("target", index, **flags) for index in range(2)],
        orchestrator_flags=pool_tls(certificates, identity=identity),
    )
    with system.running():
        yield system


def pool_tls(certificates, *, identity):
    """Return an orchestrator's flags: whom it trusts, and who it is if it says so."""
    flags = (f"--pool-tls-authority={certificates.authority}",)
    if identity is None:
        return flags
    own = certificates.issue(identity)
    return (*flags, f"--pool-tls-certificate={own.certificate}", f"--pool-tls-key={own.key}")


def refusing(client):
    """Return the model servers that an orchestrator knows, once all of them have refused it."""
    with suppress(PacelineError):  # it is not up yet
        servers = client.info().servers
        if all(server.status == "PERMISSION_DENIED" for server in servers):
            return servers
    return ()


def test_over_tls_the_tokens_are_those_of_plain_decoding(secured):
    evidence = secured.watch()
    with secured.client() as client:
        expected = plain(client, max_tokens=TOKENS)
        with evidence.gathered():
            done = client.generate(
                PROMPT, strategy="distributed", max_tokens=TOKENS, lookahead=3, targets=2
            ).collect()
    assert len(done.token_ids) == TOKENS
    assert done.token_ids == expected
    assert evidence.draft_count > 0


@pytest.mark.parametrize("secured", ["mtls"], indirect=True)
@pytest.mark.parametrize("identity", [CLIENT, "spiffe://paceline/nobody"])
def test_an_orchestrator_in_another_role_is_refused_by_every_model_server(
    identity, secured, certificates
):
    stranger = System(
        drafters=secured.drafters,
        targets=secured.targets,
        orchestrator_flags=pool_tls(certificates, identity=identity),
    ).orchestrators[0]
    try:
        stranger.start()
        with Client(stranger.address) as client:
            servers = eventually(
                lambda: refusing(client),
                what="every model server has refused it",
                within_seconds=120,
            )
            assert len(servers) == len(secured.models)
            with pytest.raises(TryAgainError):
                client.generate(PROMPT, max_tokens=1).collect()
    finally:
        stranger.stop()
    for server in secured.models:
        assert server.metric("paceline_rpcs_total", code="PERMISSION_DENIED") > 0
