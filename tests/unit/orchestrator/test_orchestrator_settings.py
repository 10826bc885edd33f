"""What an operator can say of discovery and scaling, and what each mistake is answered with."""

from __future__ import annotations

import pytest

from paceline_orchestrator.fleet.discovery import Role, Service
from paceline_orchestrator.settings import OrchestratorSettings
from paceline_serving.command_line import parse


def read(*flags, **environment):
    return parse(OrchestratorSettings, flags, program="it", environment=environment)


def test_services_can_be_given_again_or_with_commas_or_in_the_environment():
    services = (Service("one", Role.TARGET), Service("two", Role.TARGET, 7))
    common = ("--discovery=kubernetes", "--insecure")
    apart = read(*common, "--target-service=one", "--target-service=two:7")
    together = read(*common, "--target-service=one,two:7")
    elsewhere = read(*common, PACELINE_TARGET_SERVICE="one, two:7")
    assert apart.services == together.services == elsewhere.services == services


def test_drafters_and_targets_are_told_apart_by_the_flag():
    settings = read("--discovery=dns", "--insecure", "--target-service=t", "--drafter-service=d:7")
    assert settings.services == (Service("d", Role.DRAFTER, 7), Service("t", Role.TARGET))


def test_the_other_orchestrators_are_a_service_with_a_port():
    settings = read(
        "--discovery=kubernetes",
        "--insecure",
        "--target-service=t",
        "--peer-service=me:50060",
        "--scaler-listen=0.0.0.0:50060",
    )
    assert settings.peers == Service("me", Role.ORCHESTRATOR, 50060)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--targets is needed"),
        (["--discovery=dns"], "--target-service is needed"),
        (["--target-service=t", "--targets=a:1"], "--discovery=dns or kubernetes"),
        (["--discovery=dns", "--target-service=t", "--targets=a:1"], "--discovery=static"),
        (["--discovery=dns", "--target-service=t:x"], "'t:x' is not NAME or NAME:PORT"),
        (["--discovery=dns", "--target-service=-"], "is not NAME or NAME:PORT"),
        (["--discovery=dns", "--target-service=t..here"], "is not NAME or NAME:PORT"),
        (["--discovery=dns", f"--target-service={64 * 't'}.here"], "is not NAME or NAME:PORT"),
        (["--discovery=dns", f"--target-service={127 * 't.'}t"], "is not NAME or NAME:PORT"),
        (["--discovery=dns", "--target-service=t,t"], "two entries have the same name"),
        (["--discovery=dns", "--target-service=t", "--drafter-service=t"], "the same name"),
        (["--discovery=dns", "--target-service=t"], "--insecure allows plaintext"),
        (["--discovery=konsul"], "--discovery"),
        (["--targets=127.0.0.1:1", "--peer-service=me"], "as NAME:PORT"),
        (
            ["--targets=127.0.0.1:1", "--max-gram-bigrams=/dev/null"],
            "/dev/null: is not a regular file",
        ),
        (["--targets=127.0.0.1:1", "--max-gram-bigrams=/nowhere/it"], "No such file"),
        (["--targets=127.0.0.1:1", "--max-gram-tie=first"], "--max-gram-tie"),
        (["--targets=127.0.0.1:1", "--peer-service=me:1"], "--scaler-listen"),
        (
            ["--targets=127.0.0.1:1", "--peer-service=me:1", "--scaler-listen=127.0.0.1:0"],
            "--discovery=dns or kubernetes",
        ),
        (["--targets=127.0.0.1:1", "--scaler-listen=0.0.0.0:1"], "--insecure allows plaintext"),
        (["--targets=127.0.0.1:1", "--least-verifiers=9", "--most-verifiers=8"], "must not be"),
    ],
)
def test_what_makes_no_sense_is_answered_with_one_line_that_says_what_to_change(
    flags, message, capsys
):
    with pytest.raises(SystemExit) as ended:
        read(*flags)
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in err
    assert err.count("\n") == 1
