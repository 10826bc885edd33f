import asyncio

import pytest

from paceline.errors import DeadlineError
from paceline.v1.model_service_pb2 import GetModelInfoResponse
from paceline_cli import check_pair
from paceline_cli.__main__ import main
from paceline_cli.check_pair import (
    CheckPairSettings,
    _compare_outputs,
    _model_info,
    _translation,
    compare_models,
    local_config,
)
from paceline_engine.loading import LoadOptions, load_backend
from paceline_engine.model_files.target_tokens import find_target_tokens
from paceline_engine.sessions.host import HostLimits, ModelHost
from support.fake_models import FakeModelServer, serving
from support.model_servers import TARGET
from support.model_servers import serving as serving_host
from support.speakers import make_speaker


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


def test_a_target_that_is_not_there_is_noticed_before_anything_is_started(capsys, monkeypatch):
    monkeypatch.setattr(check_pair, "_CONNECT_SECONDS", 0.1)
    assert main(["check-pair", "--drafter", "/x", "--target", "127.0.0.1:1"]) == 1
    err = capsys.readouterr().err
    assert "no connection" in err
    assert "starting" not in err


@pytest.mark.parametrize(
    ("drafter", "target", "words"),
    [
        ("target-0", "drafter-0", "--drafter target-0 is a target and --target drafter-0 is a dra"),
        ("target-0", "target-1", "--drafter target-0 is a target, not a drafter"),
        ("drafter-0", "drafter-1", "--target drafter-1 is a drafter, not a target"),
    ],
)
def test_servers_in_the_wrong_role_are_named_before_anything_is_started(
    capsys, drafter, target, words
):
    async def check(addresses):
        named = [addresses[drafter], addresses[target]]
        return await asyncio.to_thread(
            main, ["check-pair", f"--drafter={named[0]}", f"--target={named[1]}"]
        )

    async def run():
        names = ("drafter-0", "drafter-1", "target-0", "target-1")
        fakes = [FakeModelServer(name.partition("-")[0]) for name in names]
        async with serving(*fakes):
            addresses = {name: it.address for name, it in zip(names, fakes, strict=True)}
            code = await check(addresses)
        return code, addresses

    code, addresses = asyncio.run(run())
    err = capsys.readouterr().err
    for name, address in addresses.items():
        err = err.replace(address, name)
    assert code == 1
    assert words in err
    assert "starting" not in err


def test_a_pair_of_which_nothing_was_drafted_is_not_said_to_fit(capsys, fake):
    assert asyncio.run(_compare_outputs(fake.address, ["x"], 4)) == 1
    out = capsys.readouterr().out
    assert "Nothing was drafted" in out
    assert "The pair fits" not in out


def test_an_orchestrator_is_no_model(capsys, fake):
    assert main(["check-pair", "--drafter", "/x", "--target", fake.address]) == 1
    words = f"{fake.address} is an orchestrator, not a drafter or a target"
    assert words in capsys.readouterr().err


async def test_a_server_that_is_loading_is_waited_for(monkeypatch):
    told, lines = asyncio.Event(), []

    class Screen:
        def print(self, line, **_):
            lines.append(line)
            told.set()

    monkeypatch.setattr(check_pair, "diagnostics", Screen)
    settings = CheckPairSettings(drafter="/x", target="/y")
    target = FakeModelServer("target", is_loading=True)
    async with serving(target):
        await target.set_serving(False)
        async with asyncio.TaskGroup() as tasks:
            info = tasks.create_task(_model_info(target.address, settings), name="info")
            await told.wait()
            assert not info.done()
            target.is_loading = False
            await target.set_serving(True)
    assert info.result().fingerprint == "target-model"
    assert lines == [f"waiting for {target.address}, which is still loading ..."]


async def test_a_server_that_goes_on_loading_is_not_waited_for_for_ever():
    settings = CheckPairSettings(drafter="/x", target="/y", timeout_seconds=0.05)
    target = FakeModelServer("target", is_loading=True)
    async with serving(target):
        await target.set_serving(False)
        with pytest.raises(DeadlineError):
            await _model_info(target.address, settings)


@pytest.fixture(scope="module")
def speakers(tmp_path_factory):
    root = tmp_path_factory.mktemp("speakers")
    return {kind: str(make_speaker(kind, root / kind, seed=1)) for kind in ("pieces", "unigram")}


async def asked(drafter, target, folder, *, options=()):
    settings = CheckPairSettings(drafter=drafter, target=target, drafter_option=options)
    return await _translation(settings, {}, folder)


async def test_a_drafter_of_another_vocabulary_is_told_what_to_speak(speakers, tmp_path):
    drafter, target = speakers["unigram"], speakers["pieces"]
    found = await asked(drafter, target, tmp_path)
    assert found.overlap.suffices
    assert "token 0 is '<pad>' and '<unk>'; " in found.told()
    assert "% of the target's tokens" in found.told()
    settings = CheckPairSettings(drafter=drafter, target=target)
    assert f"--speak={target}" in local_config(settings, speak=found.speak).drafter_arguments


async def test_models_with_one_tokenizer_need_no_translation(speakers, tmp_path):
    model = speakers["pieces"]
    assert await asked(model, model, tmp_path) is None
    # Nor do those that somebody has looked after, or that are elsewhere.
    assert await asked(speakers["unigram"], model, tmp_path, options=["speak=x"]) is None
    assert await asked("some/model", model, tmp_path) is None


async def test_a_running_servers_tokenizer_is_fetched_for_the_drafter(speakers, tmp_path):
    host = ModelHost(
        lambda: load_backend(LoadOptions(model=speakers["pieces"])),
        limits=HostLimits(warm_up_rounds=0),
    )
    async with serving_host(TARGET, host) as process:
        address = process.addresses["address"]
        settings = CheckPairSettings(drafter=speakers["unigram"], target=address)
        running = {address: await _model_info(address, settings)}
        found = await _translation(settings, running, tmp_path)
    told = find_target_tokens(found.speak)
    assert told.tokenizer == find_target_tokens(speakers["pieces"]).tokenizer
    assert (told.vocabulary_size, told.end_ids) == (420, (2,))


@pytest.mark.parametrize(
    ("option", "flag"),
    [
        ("device=cuda:0", "--device=cuda:0"),
        ("--dtype=bfloat16", "--dtype=bfloat16"),
        ("invariant=true", "--invariant"),
        ("capture=false", "--no-capture"),
        ("lora=a={x}", "--lora=a={x}"),
    ],
)
def test_an_option_of_a_server_becomes_its_flag(option, flag):
    started = CheckPairSettings(drafter="/a", target="/b", target_option=(option,))
    assert started.target_arguments("/b")[-1] == flag
