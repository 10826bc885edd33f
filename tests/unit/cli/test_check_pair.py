import pytest

from paceline.v1.model_service_pb2 import GetModelInfoResponse
from paceline_cli.__main__ import main
from paceline_cli.check_pair import CheckPairSettings, compare_models, local_config


def model(**facts):
    return GetModelInfoResponse(
        **{"tokenizer_fingerprint": "aa", "vocabulary_size": 8, "eos_token_ids": [0], **facts}
    )


def test_a_pair_with_one_tokenizer_fits_whatever_the_models_are_called():
    findings = list(compare_models(model(model_name="small"), model(model_name="big")))
    assert all(finding.fits for finding in findings)


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({"tokenizer_fingerprint": "bb"}, "tokenizer"),
        ({"vocabulary_size": 9}, "vocabulary"),
        ({"eos_token_ids": [0, 1]}, "end of text"),
    ],
)
def test_what_differs_is_named(facts, what):
    findings = compare_models(model(), model(**facts))
    assert [finding.what for finding in findings if not finding.fits] == [what]


def test_directories_are_started_and_addresses_are_used(tmp_path):
    settings = CheckPairSettings(drafter=str(tmp_path), target="127.0.0.1:50051")
    config = local_config(settings)
    assert (config.drafters, config.targets) == (1, 0)
    assert config.more_targets == ("127.0.0.1:50051",)
    assert f"--model={tmp_path}" in config.drafter_arguments


def test_options_of_the_models_and_tls_reach_the_servers():
    running = CheckPairSettings(
        drafter="10.0.0.1:1", target="10.0.0.2:1", tls_authority="ca.pem", insecure=True
    )
    flags = local_config(running).orchestrator_arguments
    assert flags == ("--pool-tls-authority=ca.pem", "--insecure")
    started = CheckPairSettings(drafter="/a", target="/b", target_option=("device=cuda:0",))
    assert "--device=cuda:0" in local_config(started).target_arguments


def test_tls_is_not_for_servers_that_are_started_here(capsys):
    with pytest.raises(SystemExit):
        main(["check-pair", "--drafter", "/a", "--target", "a:1", "--tls-authority", "ca.pem"])
    assert "give both as HOST:PORT" in capsys.readouterr().err


def test_both_models_are_needed(capsys):
    with pytest.raises(SystemExit):
        main(["check-pair", "--drafter", "x"])
    assert "--drafter and --target are needed" in capsys.readouterr().err


def test_a_target_that_is_not_there_is_noticed_before_anything_is_started(capsys):
    assert main(["check-pair", "--drafter", "/x", "--target", "127.0.0.1:1"]) == 1
    err = capsys.readouterr().err
    assert "no connection" in err
    assert "starting" not in err
