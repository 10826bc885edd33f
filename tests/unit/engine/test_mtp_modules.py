"""Targets that draft with the module inside their checkpoint: what is proposed, and what is not."""

from __future__ import annotations

import logging
from array import array

import pytest
import torch
from safetensors.torch import load_file

from paceline_contract.proposal import Proposal
from paceline_engine.deciding.decisions import rank_from
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.items import Item, Judge
from paceline_engine.terms.rank_paths import propose
from paceline_engine.torch_backend.memory import FreeMemory
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.families import build_family
from support.mtp_checkpoints import (
    APART,
    LAYERS,
    LAYOUTS,
    build_with_module,
    change_config,
    change_weights,
    module_reference,
)
from unit.engine.conftest import NEVER, continuation
from unit.engine.models import (
    check_any_past,
    check_guesses,
    check_kept_beginning,
    check_prompt_in_parts,
    decode_by_proposals,
    specs,
)

SPECS = specs(300)
SPEC = SPECS[0]
PROMPT = [5, 6, 7, 8, 9]
REACH = 3
VOCABULARY_SIZE = 300
CHAIN = ((0,), (0, 0), (0, 0, 0))


@pytest.fixture(scope="module", params=LAYOUTS)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family, tmp_path_factory):
    return build_with_module(family, tmp_path_factory.mktemp("checkpoints") / family)


@pytest.fixture(scope="module")
def backend(checkpoint):
    return TransformersBackend(str(checkpoint), adapter="mtp")


@pytest.fixture(scope="module")
def plain(checkpoint):
    return TransformersBackend(str(checkpoint))


@pytest.fixture(scope="module")
def expected(family, checkpoint):
    """What is to be proposed after a text and the next token, by the slow module."""
    guess, known = module_reference(family, checkpoint), {}

    def proposal(text, next_token, spec=SPEC):
        if (key := (*text, next_token, spec.seed)) not in known:
            found = []

            def choose(step, logits):
                (ranked,) = rank_from(
                    logits[None, :VOCABULARY_SIZE].float(),
                    spec=spec,
                    positions=[len(text) + 1 + step],
                    count=1,
                )
                found.append([ranked[0][0]])
                return ranked[0][0]

            guess([*text, next_token], steps=REACH, choose=choose)
            known[key] = propose(CHAIN, found)
        return known[key]

    return proposal


@pytest.mark.parametrize("spec", SPECS, ids=["greedy", "nucleus", "top-k"])
def test_what_is_proposed_is_what_the_slow_module_guesses(backend, expected, spec):
    check_guesses(backend, spec, PROMPT, lambda text, token: expected(text, token, spec))


def test_decoding_by_its_proposals_is_plain_decoding(backend, plain, family):
    is_recurrent = LAYOUTS[family] is APART
    for spec in SPECS:
        count = 95 if is_recurrent and spec is SPEC else 25  # its layers close rows on the way
        made, judgements = decode_by_proposals(ModelText(backend, spec), PROMPT, count=count)
        assert all(len(judged.proposal) for judged in judgements)
        assert made == continuation(ModelText(plain, spec), PROMPT, len(made))


def test_with_invariance_decoding_by_its_proposals_is_plain_decoding_too(tmp_path):
    checkpoint = str(build_with_module("qwen3.5", tmp_path / "model"))
    backend = TransformersBackend(checkpoint, adapter="mtp", invariant=True)
    plain = TransformersBackend(checkpoint, invariant=True)
    made, judgements = decode_by_proposals(ModelText(backend, SPEC), PROMPT, count=80)
    assert all(len(judged.proposal) for judged in judgements)
    assert made == continuation(ModelText(plain, SPEC), PROMPT, len(made))


# Each family with one of them in turns; with the other one in `make test-long`.
@pytest.mark.parametrize(
    ("family", "weights"),
    [
        pytest.param(family, weights, marks=[pytest.mark.long] * (index % 2 != place))
        for index, family in enumerate(LAYOUTS)
        for place, weights in enumerate(("int8", "int4"))
    ],
    indirect=["family"],
)
def test_a_module_beside_whole_numbers_guesses_and_the_text_is_as_without_it(checkpoint, weights):
    drafting, plain = (
        TransformersBackend(str(checkpoint), adapter=adapter, weights=weights)
        for adapter in ("mtp", None)
    )
    for spec in SPECS:
        made, judgements = decode_by_proposals(ModelText(drafting, spec), PROMPT, count=25)
        assert all(len(judged.proposal) for judged in judgements)
        assert made == continuation(ModelText(plain, spec), PROMPT, len(made))


def test_its_load_leaves_the_model_as_it_was(backend, plain):
    loaded, alone = (each.model.config.get_text_config(decoder=True) for each in (backend, plain))
    folders = {"_name_or_path"}  # each load lays the files out in one of its own
    assert {k: it for k, it in loaded.to_dict().items() if k not in folders} == {
        k: it for k, it in alone.to_dict().items() if k not in folders
    }
    unread = (each.model._keys_to_ignore_on_load_unexpected for each in (backend, plain))
    assert len({*map(str, unread)}) == 1


def test_whatever_happened_before_guesses_are_those_of_the_text_alone(backend, expected):
    check_any_past(backend, SPEC, expected)


def test_each_text_of_a_forward_gets_what_it_would_get_alone(backend, expected):
    def items():
        made = []
        for n in range(6):
            spec = SPECS[n % 3]
            prefix = array("I", [7 + n, *range(1 + 3 * n)])
            task = Judge(Proposal((9,)), propose=n % 3 != 2)
            made.append(Item(backend.new_cache(spec), spec, prefix=prefix, task=task))
        return made

    asked = items()
    together = [each.judgement for each in backend.run(asked, NEVER)]
    assert together == [backend.run([each], NEVER)[0].judgement for each in items()]
    for item, judged in zip(asked, together, strict=True):
        if item.proposes:
            after = [*item.prefix, *item.task.proposal.along(judged.accepted_path)]
            wanted = expected(after, judged.next_token, item.spec)
            assert judged.proposal.token_ids == wanted.token_ids
        else:
            assert not judged.proposal


def test_a_text_that_begins_as_a_kept_one_has_its_features_too(backend, expected):
    check_kept_beginning(backend, SPEC, expected)


def test_a_long_prompt_in_parts_is_a_prompt(backend, expected):
    check_prompt_in_parts(backend, SPEC, expected, length=100, row_limit=30)


def test_its_state_is_paid_for_and_a_model_without_it_is_as_ever(family, backend, plain, tmp_path):
    without = TransformersBackend(str(build_family(family, tmp_path / "without")))
    assert plain.token_memory().bytes_per_token == without.token_memory().bytes_per_token
    assert backend.token_memory().bytes_per_token > plain.token_memory().bytes_per_token
    assert plain.own_guesses is None
    assert (backend.description.self_draft_kind, plain.description.self_draft_kind) == ("mtp", "")
    assert backend.description.fingerprint == plain.description.fingerprint
    assert plain.description.fingerprint != without.description.fingerprint


def test_a_module_that_has_no_room_beside_its_model_is_refused(family, checkpoint, monkeypatch):
    pattern = f"{LAYOUTS[family]['layer'].removesuffix('layers.0')}"
    stored = load_file(checkpoint / "model.safetensors")
    module = sum(
        each.numel()
        for name, each in stored.items()
        if name.startswith(pattern) and not name.endswith(("embed_tokens.weight", "head.weight"))
    )
    alone = sum(each.numel() for each in TransformersBackend(str(checkpoint)).model.parameters())

    def leave(count):
        memory = FreeMemory(4 * count, 0.5)
        where = "paceline_engine.torch_backend.model_loading.free_memory"
        monkeypatch.setattr(where, lambda _: memory)

    leave(alone)
    TransformersBackend(str(checkpoint))
    leave(alone + module - 1)
    assert "its weights and its module's take" in refusal(checkpoint)
    leave(alone + module)
    TransformersBackend(str(checkpoint), adapter="mtp")


def test_as_many_guesses_as_asked_for(checkpoint):
    model = TransformersBackend(str(checkpoint), adapter="mtp", guesses=5)
    assert model.description.self_draft_depth == 5
    assert len(ModelText(model, SPEC).judge(PROMPT, propose=True).proposal) == 5


def test_the_start_tells_of_a_module_that_is_not_used(checkpoint, caplog, tmp_path):
    with caplog.at_level(logging.INFO):
        TransformersBackend(str(checkpoint))
    assert "with --adapter mtp a target drafts with it" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        TransformersBackend(str(build_family("qwen3.5", tmp_path / "without")))
    assert "--adapter" not in caplog.text


def refusal(directory, **how):
    with pytest.raises(ModelLoadError) as caught:
        TransformersBackend(str(directory), adapter="mtp", **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def before_loading(monkeypatch):
    """Let a test fail if a model's weights are loaded."""

    def load(*_, **__):
        raise AssertionError("it is loaded")

    monkeypatch.setattr("paceline_engine.torch_backend.transformers.load_model", load)


@pytest.mark.usefixtures("before_loading")
def test_what_has_no_module_is_refused_before_it_is_loaded(family, tmp_path):
    assert "has no module" in refusal(build_family(family, tmp_path / "without"))


@pytest.mark.usefixtures("before_loading")
def test_a_family_without_known_modules_is_refused_by_its_name(tiny_pair):
    assert "is of the kind 'llama'" in refusal(tiny_pair.target)


@pytest.mark.usefixtures("before_loading")
def test_several_modules_are_refused(family, tmp_path):
    directory = build_with_module(family, tmp_path / "several")
    layer = LAYOUTS[family]["layer"]
    first = int(layer.rpartition(".")[2])

    def add(weights):
        weights[f"{layer.rpartition('.')[0]}.{first + 1}.input_layernorm.weight"] = torch.ones(32)

    change_weights(directory, add)
    assert "has 2 modules" in refusal(directory)


@pytest.mark.usefixtures("before_loading")
def test_a_quantised_checkpoint_is_refused(tmp_path):
    directory = build_with_module("qwen3.5", tmp_path / "quantised")
    change_config(
        directory,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )
    assert "is quantised" in refusal(directory)


def test_a_module_of_another_shape_or_with_a_missing_or_broken_weight_is_refused(tmp_path):
    for family, names in (("qwen3.5", APART), ("glm4-moe", LAYOUTS["glm4-moe"])):
        for what, key in (("missing", "fc"), ("narrow", "fc"), ("broken", "norm")):
            directory = build_with_module(family, tmp_path / f"{family}-{what}")
            name = f"{names[key]}.weight"

            def change(weights, what=what, name=name):
                if what == "missing":
                    del weights[name]
                elif what == "narrow":
                    weights[name] = weights[name][:, :-1]
                else:
                    weights[name][3] = torch.nan

            change_weights(directory, change)
            found = refusal(directory)
            assert ("no numbers" if what == "broken" else "cannot be loaded") in found
            assert "eh_proj" in found or what != "missing"


@pytest.mark.parametrize("name", ["mtp.embed_tokens.weight", "mtp.shared_head.weight"])
def test_a_module_with_an_embedding_or_a_head_is_refused(name, tmp_path):
    """The library would put it in the place of the model's own, whose tokens were others then."""
    directory = build_with_module("qwen3.5", tmp_path / "module")

    def add(weights):
        weights[name] = 2 * weights["model.embed_tokens.weight"]

    change_weights(directory, add)
    assert name in refusal(directory)


@pytest.mark.parametrize("family", ["glm4-moe", "deepseek-v3"])
@pytest.mark.parametrize("copy", ["embed_tokens", "shared_head.head"])
def test_a_modules_copies_of_embedding_and_head_are_never_used(family, copy, tmp_path):
    """Not even copies that differ: the model's own tokens would be others."""
    directory = build_with_module(family, tmp_path / "module")
    honest = TransformersBackend(str(directory), adapter="mtp")

    def change(weights):
        weights[f"model.layers.{LAYERS}.{copy}.weight"] *= -2

    change_weights(directory, change)
    other = TransformersBackend(str(directory), adapter="mtp")
    for token in range(20):
        said = [
            ModelText(it, SPEC).judge([*PROMPT, token], [], parents=[], propose=True)
            for it in (honest, other)
        ]
        assert said[0].next_token == said[1].next_token
        assert said[0].proposal == said[1].proposal


@pytest.mark.parametrize("family", ["glm4-moe", "deepseek-v3"])
def test_what_chooses_a_modules_experts_is_as_precise_in_bfloat16_as_the_file_says(
    family, tmp_path
):
    """In bfloat16 there is one number between 998 and 1002: then all experts were alike."""
    backends = []
    for name, step in (("own", 0.6), ("alike", 0.0)):
        directory = build_with_module(family, tmp_path / name)

        def change(weights, step=step):
            bias = weights[f"model.layers.{LAYERS}.mlp.gate.e_score_correction_bias"]
            bias.copy_(1000 + step * torch.arange(len(bias)))

        change_weights(directory, change)
        backends.append(TransformersBackend(str(directory), adapter="mtp", dtype="bfloat16"))
    said = [
        [
            ModelText(it, SPEC).judge([*PROMPT, token], [], parents=[], propose=True).proposal
            for token in range(20)
        ]
        for it in backends
    ]
    assert said[0] != said[1]


def test_experts_side_by_side_in_one_weight_are_the_same_module(tmp_path):
    """So published Qwen3.5 has them; others have a weight for each expert."""
    directory = build_with_module("qwen3.5-moe", tmp_path / "module")
    apart = TransformersBackend(str(directory), adapter="mtp")

    def change(weights):
        for layer in ("mtp.layers.0", "model.layers.0", "model.layers.1"):
            prefix = f"{layer}.mlp.experts."
            own = {
                part: [weights.pop(f"{prefix}{n}.{part}_proj.weight") for n in range(4)]
                for part in ("gate", "up", "down")
            }
            both = [torch.cat(pair) for pair in zip(own["gate"], own["up"], strict=True)]
            weights[f"{prefix}gate_up_proj"] = torch.stack(both)
            weights[f"{prefix}down_proj"] = torch.stack(own["down"])

    change_weights(directory, change)
    together = TransformersBackend(str(directory), adapter="mtp")
    for token in range(20):
        said = [
            ModelText(it, SPEC).judge([*PROMPT, token], propose=True) for it in (apart, together)
        ]
        assert said[0].next_token == said[1].next_token
        assert said[0].proposal == said[1].proposal


def test_a_module_that_cannot_be_computed_is_refused_at_load(tmp_path):
    directory = build_with_module("qwen3.5", tmp_path / "module")
    change_config(directory, chain_hidden_post_norm=False)
    assert "cannot be loaded" in refusal(directory)


def test_layouts_are_those_that_are_published(family, checkpoint):
    names = {*load_file(checkpoint / "model.safetensors")}
    own = {
        "qwen3.5": {"mtp.fc.weight", "mtp.layers.0.mlp.gate_proj.weight", "mtp.norm.weight"},
        "qwen3.5-moe": {"mtp.fc.weight", "mtp.layers.0.mlp.shared_expert.up_proj.weight"},
        "qwen3-next": {"mtp.fc.weight", "mtp.layers.0.mlp.experts.3.up_proj.weight"},
        "glm4-moe": {
            f"model.layers.{LAYERS}.eh_proj.weight",
            f"model.layers.{LAYERS}.mlp.experts.3.up_proj.weight",
            f"model.layers.{LAYERS}.shared_head.head.weight",
        },
        "deepseek-v3": {
            f"model.layers.{LAYERS}.enorm.weight",
            f"model.layers.{LAYERS}.self_attn.kv_b_proj.weight",
        },
    }
    assert own[family] <= names
