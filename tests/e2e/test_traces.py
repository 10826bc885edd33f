"""One request, one trace: what a collector hears of a client's call, from every server."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from support.processes import GatewayProcess, running
from support.system import System, simulated_model

TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps spans by the name of their server."""

    def __init__(self):
        self.spans = []

    def Export(self, request, context):  # noqa: N802
        for resource in request.resource_spans:
            names = [it.value.string_value for it in resource.resource.attributes
                     if it.key == "service.name"]  # fmt: skip
            for scope in resource.scope_spans:
                self.spans += [(names[0], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, server):
        """Return the spans of the client's trace from one kind of server."""
        return [
            span
            for name, span in self.spans
            if name == f"paceline-{server}" and span.trace_id.hex() == TRACE
        ]


@contextmanager
def collecting():
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, f"http://127.0.0.1:{port}"
    server.stop(None).wait()


def fetch(url, body=None, **headers):
    content = json.dumps(body).encode() if body else None
    with urllib.request.urlopen(
        urllib.request.Request(url, content, {"content-type": "application/json", **headers}),
        timeout=60,
    ) as page:
        return json.loads(page.read())


def names_below(spans, parent):
    return {span.name for span in spans if span.parent_span_id == parent}


@pytest.mark.long
def test_one_trace_leads_from_a_client_through_gateway_and_orchestrator_to_the_models():
    with collecting() as (collector, endpoint):
        system = System(
            drafters=[simulated_model("drafter", trace_endpoint=endpoint)],
            targets=[simulated_model("target", trace_endpoint=endpoint)],
            orchestrator_flags=(f"--trace-endpoint={endpoint}",),
        )
        with system.running():
            (orchestrator,) = system.orchestrators
            system.wait_until_whole()
            gateway = GatewayProcess(
                f"--orchestrators={orchestrator.address}", f"--trace-endpoint={endpoint}"
            )
            with running(gateway):
                model = fetch(f"{gateway.url}/v1/models")["data"][0]["id"]
                asked = {"model": model, "prompt": "def f(", "max_tokens": 8,
                         "paceline": {"strategy": "speculative"}}  # fmt: skip
                fetch(
                    f"{gateway.url}/v1/completions",
                    asked,
                    traceparent=f"00-{TRACE}-{CLIENT}-01",
                )
                for server in (gateway, orchestrator, *system.models):
                    server.terminate()
                    assert server.wait() == 0  # what it had left is sent by now
    (request,) = collector.of("gateway")
    assert (request.name, request.parent_span_id.hex()) == ("POST /v1/completions", CLIENT)
    generations = [it for it in collector.of("orchestrator") if it.name.endswith("/Generate")]
    (generation,) = generations
    assert generation.parent_span_id == request.span_id
    at_target = names_below(collector.of("target"), generation.span_id)
    at_drafter = names_below(collector.of("drafter"), generation.span_id)
    assert "paceline.v1.TargetService/Verify" in at_target
    assert "paceline.v1.DrafterService/Draft" in at_drafter
    assert "paceline.v1.SessionService/OpenSession" in at_target & at_drafter
