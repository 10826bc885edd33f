"""What servers say is told as it is said; what this client has no word for, by its number."""

from paceline.generation import TokenLogprob
from paceline.responses import read_chunk, read_finished, read_system_info
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1 import sampling_pb2


def test_a_fallback_of_a_kind_without_a_name_is_told_by_its_number():
    statistics = pb.GenerationStatistics(
        fallbacks=[
            pb.Fallback(kind=pb.FALLBACK_KIND_NO_DRAFTER, count=3),
            pb.Fallback(kind=12, count=2),
            pb.Fallback(count=1),
        ]
    )
    finished = read_finished(pb.GenerationFinished(statistics=statistics))
    assert finished.statistics.fallbacks == {"no_drafter": 3, "fallback 12": 2, "fallback 0": 1}


def test_a_server_of_a_role_without_a_name_is_told_by_its_number():
    servers = [pb.ServerInfo(role=1), pb.ServerInfo(role=2), pb.ServerInfo(role=12)]
    info = read_system_info(pb.GetSystemInfoResponse(servers=servers))
    assert [server.role for server in info.servers] == ["drafter", "target", "role 12"]


def test_each_likely_token_has_its_own_log_probability():
    likeliest = [
        sampling_pb2.LikeliestTokens(token_ids=[7, 5], logprobs=[-0.25, -1.5]),
        sampling_pb2.LikeliestTokens(token_ids=[6], logprobs=[-0.5]),
    ]
    chunk = read_chunk(pb.GenerationChunk(token_ids=[7, 6], top_logprobs=likeliest))
    assert chunk.top_logprobs == (
        (TokenLogprob(7, -0.25), TokenLogprob(5, -1.5)),
        (TokenLogprob(6, -0.5),),
    )
