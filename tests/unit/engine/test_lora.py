"""Rows with LoRA adapters: those of the merged model, whatever shares a forward with them."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline_contract.sampling import SamplingParameters
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Draft, Item, Judge
from paceline_engine.torch_backend.library import LibraryDecoder
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.recurrent.recurrent_decoder import RecurrentDecoder
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.device import on_a_cpu
from support.families import build_family
from support.lora_folders import merge, write_lora
from support.tiny_models import build_wide_model
from unit.engine.conftest import NEVER, chain, continuation
from unit.engine.models import draft_together, loaded

SPEC = SessionSpec(300)
SAMPLED = SessionSpec(300, SamplingParameters(0.8, top_p=0.95), seed=3)
PROMPT = [5, 6, 7, 8, 9, 10, 11]
SHAPES = {
    "plain": {"seed": 1},
    "half": {"seed": 2, "dtype": torch.bfloat16},
    "stable": {"seed": 3, "use_rslora": True, "rank": 3, "alpha": 4},
    "few": {"seed": 4, "modules": r".*\.[12]\..*(k|up)_proj", "alpha": 40},
    "patterned": {
        "seed": 5,
        "ranks": {"q_proj": 7, "mlp.down_proj": 2},
        "alpha_pattern": {"v_proj": 3, "model.layers.1.self_attn.o_proj": 32},
    },
}


@pytest.fixture(scope="module")
def folders(tiny_pair, tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    return {
        name: write_lora(root / name, tiny_pair.target, **shape) for name, shape in SHAPES.items()
    }


def settings(folders):
    return [f"{name}={folder}" for name, folder in folders.items()]


@pytest.fixture(scope="module", params=["fused", "library"])
def backend(request, tiny_pair, folders):
    backend = loaded(tiny_pair.target, request.param, lora=settings(folders))
    assert type(backend.decoder) is (FusedLlama if request.param == "fused" else LibraryDecoder)
    return backend


@pytest.fixture(scope="module")
def merged(tiny_pair, folders, tmp_path_factory):
    root = tmp_path_factory.mktemp("merged")
    return {
        name: TransformersBackend(str(merge(tiny_pair.target, folder, root / name)))
        for name, folder in folders.items()
    }


def text(backend, spec=SPEC, *, lora="", prompt=PROMPT, count=40):
    return continuation(ModelText(backend, replace(spec, lora=lora)), prompt, count)


def logits(backend, prefix, *, lora=""):
    """The logits of all rows of a text that is computed at once, by the log probabilities."""
    model = ModelText(backend, replace(SPEC, lora=lora))
    judged = model.judge(prefix, [], top_logprobs=20, logprobs=True)
    return dict(judged.top_logprobs[-1])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("spec", [SPEC, SAMPLED], ids=["greedy", "sampled"])
def test_an_adapters_text_is_the_merged_models(backend, merged, name, spec):
    assert text(backend, spec, lora=name) == text(merged[name], spec)


@pytest.mark.parametrize("name", SHAPES)
def test_an_adapters_log_probabilities_are_the_merged_models(backend, merged, name):
    mine, wanted = logits(backend, PROMPT, lora=name), logits(merged[name], PROMPT)
    assert mine == pytest.approx(wanted, abs=1e-3)


def test_adapters_say_other_things_than_the_model_and_each_other(backend):
    texts = {tuple(text(backend, lora=name)) for name in ["", *SHAPES]}
    assert len(texts) == 1 + len(SHAPES)


def test_without_an_adapter_the_text_is_the_models(backend, tiny_pair):
    plain = TransformersBackend(str(tiny_pair.target))
    assert text(backend) == text(plain)
    assert backend.description.fingerprint == plain.description.fingerprint


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_many_adapters_in_one_forward_are_what_they_are_alone(backend, seed):
    chance = random.Random(seed)
    names = [chance.choice(["", *SHAPES]) for _ in range(9)]
    prompts = [[chance.randrange(300) for _ in range(chance.randint(1, 40))] for _ in names]
    alone = [
        text(backend, lora=name, prompt=prompt, count=12)
        for name, prompt in zip(names, prompts, strict=True)
    ]
    specs = [replace(SPEC, lora=name) for name in names]
    items = [
        Item(backend.new_cache(spec), spec, prefix=array("I", prompt), task=Draft(12))
        for spec, prompt in zip(specs, prompts, strict=True)
    ]
    found = draft_together(backend, items)
    assert found == [[*prompt, *own] for prompt, own in zip(prompts, alone, strict=True)]


def test_blocks_and_trees_of_an_adapter_are_judged_as_the_merged_model_does(backend, merged):
    right = text(merged["plain"], count=6)
    wrong = (right[2] + 1) % 300
    for block, parents in (
        (right[:4], ()),
        ([*right[:2], wrong], ()),
        ([wrong, right[0], right[1], wrong], (0, 0, 2, 2)),
    ):
        judged = [
            ModelText(model, replace(SPEC, lora=lora)).judge(PROMPT, block, parents=parents)
            for model, lora in ((backend, "plain"), (merged["plain"], ""))
        ]
        assert judged[0].accepted_path == judged[1].accepted_path
        assert judged[0].next_token == judged[1].next_token


def scores(backend, names, prompts):
    """The log probabilities of several texts' next tokens, computed in one forward."""
    specs = [replace(SPEC, lora=name) for name in names]
    items = [
        Item(
            backend.new_cache(spec),
            spec,
            prefix=array("I", prompt),
            task=Judge(chain([]), logprobs=True, top_logprobs=20),
        )
        for spec, prompt in zip(specs, prompts, strict=True)
    ]
    return [outcome.judgement for outcome in backend.run(items, NEVER)]


@pytest.mark.parametrize("way", ["fused", "library"])
def test_rows_without_an_adapter_keep_their_bits_beside_rows_with_one(tiny_pair, folders, way):
    plain = loaded(tiny_pair.target, way)
    adapted = loaded(tiny_pair.target, way, lora=settings(folders))
    prompts = [PROMPT, PROMPT[::-1], [3], [*range(40)]]
    before = scores(plain, [""] * 4, prompts)
    beside = scores(adapted, ["", "plain", "", "few"], prompts)
    assert beside[0] == before[0]
    assert beside[2] == before[2]
    assert beside[1] != before[1]
    assert beside[3] != before[3]


def test_with_invariance_an_adapters_rows_have_the_same_bits_alone_and_beside_others(
    tiny_pair, folders
):
    backend = TransformersBackend(str(tiny_pair.target), lora=settings(folders), invariant=True)
    prompts = [PROMPT, PROMPT[::-1], [3], [*range(40)], [4, 4]]
    names = ["plain", "few", "plain", "", "stable"]
    together = scores(backend, names, prompts)
    alone = [scores(backend, [n], [p])[0] for n, p in zip(names, prompts, strict=True)]
    assert together == alone


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A wide model of one layer, whose products are packed, and an adapter of high rank."""
    root = tmp_path_factory.mktemp("wide")
    model = build_wide_model(root / "model")
    return model, [f"high={write_lora(root / 'high', model, rank=512)}"]


def test_with_invariance_an_adapter_of_high_rank_has_the_same_bits_in_hundreds_of_rows(wide):
    model, lora = wide
    backend = TransformersBackend(str(model), lora=lora, invariant=True)
    prompts = [[(7 * place + 31 * text) % 250 for place in range(100)] for text in range(4)]
    together = scores(backend, ["high"] * 4, prompts)
    assert together == [scores(backend, ["high"], [each])[0] for each in prompts]


@on_a_cpu
@pytest.mark.parametrize("weights", ["plain", "int8", "int4"])
def test_rows_of_an_adapter_have_the_same_bits_alone_and_among_others_of_it(wide, weights):
    model, lora = wide
    backend = TransformersBackend(str(model), lora=lora, weights=weights)
    prompts = [[token] for token in range(1, 31)]
    alone = [scores(backend, ["high"], [each])[0] for each in prompts]
    for count in (4, 8, 12, 17, 30):
        assert scores(backend, ["high"] * count, prompts[:count]) == alone[:count]


def test_a_fingerprint_follows_from_the_model_and_what_the_adapter_adds(
    tiny_pair, folders, tmp_path
):
    def fingerprints(model, **named):
        settings = [f"{name}={folder}" for name, folder in named.items()]
        return dict(TransformersBackend(str(model), lora=settings).description.lora_fingerprints)

    again = write_lora(tmp_path / "again", tiny_pair.target, **SHAPES["plain"], revision="x")
    louder = write_lora(tmp_path / "louder", tiny_pair.target, **SHAPES["plain"], alpha=9)
    other = write_lora(tmp_path / "other", tiny_pair.target, seed=9)
    found = fingerprints(tiny_pair.target, a=folders["plain"], b=again, c=louder, d=other)
    assert found["a"] == found["b"]
    assert len({*found.values()}) == 3
    on_drafter = write_lora(tmp_path / "small", tiny_pair.drafter)
    assert fingerprints(tiny_pair.drafter, a=on_drafter)["a"] not in found.values()
    # The same adapter beside weights of the same shapes that are others.
    base = merge(tiny_pair.target, folders["few"], tmp_path / "base")
    assert fingerprints(base, a=folders["plain"])["a"] != found["a"]
    moved = load_file(other / "adapter_model.safetensors")
    key = next(iter(moved))
    moved[key] = moved[key] * 1.001
    save_file(moved, other / "adapter_model.safetensors")
    assert fingerprints(tiny_pair.target, d=other)["d"] != found["d"]


def test_the_factors_are_added_to_products_of_eight_bits(tiny_pair, folders, merged):
    backend = TransformersBackend(
        str(tiny_pair.target), lora=[f"plain={folders['plain']}"], weights="int8"
    )
    mine, wanted = logits(backend, PROMPT, lora="plain"), logits(merged["plain"], PROMPT)
    shared = mine.keys() & wanted.keys()
    assert len(shared) > 5
    assert [mine[it] for it in shared] == pytest.approx([wanted[it] for it in shared], abs=0.5)
    assert logits(backend, PROMPT) != mine


@pytest.mark.parametrize("family", ["gemma2", "mixtral", "phi3"])
def test_other_families_add_factors_to_the_librarys_products(family, tmp_path):
    model = build_family(family, tmp_path / "model")
    lora = write_lora(tmp_path / "lora", model, modules=r".*self_attn\.(q|k|v|o|qkv)_proj")
    backend = TransformersBackend(str(model), lora=[f"a={lora}"])
    oracle = TransformersBackend(str(merge(model, lora, tmp_path / "merged")))
    assert isinstance(backend.decoder, LibraryDecoder)
    assert text(backend, lora="a") == text(oracle) != text(backend)


# All that is linear beside a recurrent state, and what attends.
RECURRENT = {
    "qwen3.5": r".*\.(in_proj_qkv|in_proj_z|in_proj_a|in_proj_b|out_proj|q_proj|o_proj|up_proj)",
    "falcon-h1": r".*\.(in_proj|out_proj|k_proj|down_proj)",
    "lfm2": r".*\.(in_proj|out_proj|q_proj|w1)",
}


@pytest.mark.parametrize(
    ("family", "invariant"),
    [
        ("qwen3.5", True),
        ("falcon-h1", False),
        ("lfm2", False),
        pytest.param("qwen3.5", False, marks=pytest.mark.long),
        pytest.param("falcon-h1", True, marks=pytest.mark.long),
        pytest.param("lfm2", True, marks=pytest.mark.long),
    ],
)
def test_recurrent_layers_add_factors_to_their_products(family, invariant, tmp_path):
    model = build_family(family, tmp_path / "model")
    lora = write_lora(tmp_path / "lora", model, modules=RECURRENT[family])
    backend = TransformersBackend(str(model), lora=[f"a={lora}"], invariant=invariant)
    oracle = TransformersBackend(str(merge(model, lora, tmp_path / "merged")))
    assert isinstance(backend.decoder, RecurrentDecoder)
    assert text(backend, lora="a") == text(oracle) != text(backend)
    # A block and the rest of a longer text, beside a text without the adapter.
    spec, said = SessionSpec(300, lora="a"), PROMPT * 12
    task = Judge(chain([9, 9, 2]), score=True, logprobs=True)
    mine, other, alone = (
        Item(by.new_cache(it), it, prefix=array("I", said), task=task)
        for by, it in ((backend, spec), (backend, SPEC), (oracle, SPEC))
    )
    beside, other = (it.judgement.logprobs for it in backend.run([mine, other], NEVER))
    (wanted,) = (it.judgement.logprobs for it in oracle.run([alone], NEVER))
    assert beside == pytest.approx(wanted, abs=5e-3)
    assert other != pytest.approx(wanted, abs=5e-2)
