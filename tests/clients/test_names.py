"""A client of a name asks DNS again within seconds after a loss: pods get new addresses."""

from __future__ import annotations

import pytest

from support.conformance.drivers import Driver
from support.conformance.stage import ScriptedStage
from support.fake_dns import FakeDns
from support.waiting import eventually

NAME = "orchestrators.test"
# Nobody listens there. All of 127.0.0.0/8 is this machine.
GONE, HERE = "127.0.0.9", "127.0.0.1"
# With gRPC's own pause between two questions it takes 30 s, in TypeScript 10 s, where a channel is
# given up then; with ours 2 s.
WITHIN_SECONDS = 8.0
SCRIPT = [
    {"started": {"seed": "7", "model_fingerprint": "model-a", "prompt_token_count": 3}},
    {"chunk": {"position": 3, "token_ids": [30], "text": "a"}},
    {
        "finished": {
            "finish_reason": "FINISH_REASON_LENGTH",
            "prompt_token_count": 3,
            "completion_token_count": 1,
        }
    },
]


@pytest.fixture
def orchestrator(loop_thread, server_files):
    with ScriptedStage(loop_thread, {"script": [SCRIPT]}, files=server_files).playing() as stage:
        yield stage


@pytest.fixture
def asking(driver):
    """Drive the language's client so that it asks the name server that an address names."""
    own = Driver(driver.language, environment={"GRPC_NODE_USE_ALTERNATIVE_RESOLVER": "true"})
    yield own
    own.close()


def test_where_a_name_leads_elsewhere_the_client_is_there_within_seconds(asking, orchestrator):
    port = orchestrator.address.rpartition(":")[2]
    with FakeDns(GONE) as dns:
        request = {
            "do": "generate",
            "client": "of a name",
            "case": "a name that leads elsewhere",
            "address": f"dns://{dns.authority}/{NAME}:{port}",
            "insecure": True,
            "prompt": {"text": "say"},
            "timeout_seconds": 2,
        }

        def text():
            return asking.ask(request, within_seconds=60)["text"]

        try:
            assert text() == ""
            assert dns.answer_count >= 1
            dns.leads_to = HERE
            eventually(
                lambda: text() == "a",
                what="it is where the name leads now",
                within_seconds=WITHIN_SECONDS,
            )
        finally:
            asking.ask({"do": "close", "client": request["client"]}, within_seconds=60)
