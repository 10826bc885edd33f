"""A drafter learns from what its target wrote, and is put together from its own weights alone."""

from __future__ import annotations

import copy
import json
import random
import shutil
from array import array
from collections import deque
from itertools import count, pairwise

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import distil_at_once
from accepted_runs import Runs
from device_texts import DeviceTexts
from distillation import (
    Choice,
    Drafter,
    Texts,
    choose_tokens,
    embeddings_digest,
    evaluate,
    load_target,
    shallow,
)
from drafter_card import measure
from drafter_training import Training, write_own
from led_rows import LedRows, Script
from paceline_contract.sampling import SamplingParameters
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.torch_backend.transformers import TransformersBackend
from side_by_side import SideBySide
from smollm2_drafter import CARD, OtherTargetError, lay_out
from support.tiny_models import build_tokenizer
from text_writers import (
    ANSWER_TOKENS,
    GIVEN,
    OWN,
    TEMPLATE,
    USER,
    USER_TEMPERATURE,
    USER_TOKENS,
    Writer,
    Writers,
)

torch.set_num_threads(1)

SIZE, LENGTH, KEPT = 300, 40, 32
END = 7
TEMPLATE_SOURCE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' +"
    " message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHOICE = Choice((0, 3), tuple(range(0, SIZE, 2)))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target of SmolLM2's shape, small: tied, with three query heads for each key head."""
    folder = tmp_path_factory.mktemp("distilled") / "target"
    config = LlamaConfig(
        vocab_size=SIZE,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=END,
        pad_token_id=None,
    )
    torch.manual_seed(4)
    LlamaForCausalLM(config).save_pretrained(folder)
    build_tokenizer(SIZE).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def model(target):
    return load_target(str(target))


def writer(temperature=0.0, turns=None, answer=(8, 9)):
    """A writer of chats, or of other text, with turns that begin as told."""
    begun = iter(turns or [])
    return Writer(
        temperature,
        lambda: next(begun, [(1, TEMPLATE), (2, TEMPLATE), (50, GIVEN)]),
        answer=answer,
        end_ids=(END,),
    )


def written(model, *, rows=24, seed=1, length=LENGTH):
    """A batch of greedy texts and drawn ones, in turns; half of them are chats."""
    scripts = [
        Script.of(writer(float(row % 2), answer=(8, 9) if row % 4 < 2 else ()), length=length)
        for row in range(rows)
    ]
    room = SideBySide(model, rows=rows, length=length)
    writing = DeviceTexts(room, rows=rows, length=length, kept=KEPT)
    return writing.write(scripts, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def texts(model):
    return Texts(**written(model))


def read(writer, drawn):
    """Lead a text until these tokens are drawn; return its tokens with their origins."""
    found, left, length = [], deque(drawn), 400 + len(drawn)
    rows = LedRows(rows=1, length=length, device=torch.device("cpu"))
    rows.begin([Script.of(writer, length=length)])
    while left:
        token_id, origin = map(int, rows.advance(torch.tensor([left[0]])))
        if origin in {USER, OWN}:
            left.popleft()
        found.append((token_id, origin))
    return found


def steps_of(writer):
    """Lead one text, without tensors.

    Yields what comes next, a given token or a temperature to draw at, with the token's origin. Is
    sent the token that stands there.
    """
    is_user, length, waiting = bool(writer.answer), 0, deque(writer.open_turn())
    while True:
        limit = USER_TOKENS if is_user else ANSWER_TOKENS
        if waiting:
            given, origin = waiting.popleft()
        elif writer.answer and length >= limit:
            given, origin = writer.end_ids[0], TEMPLATE
        else:
            given, origin = None, USER if is_user else OWN
        token_id = yield given, origin, USER_TEMPERATURE if is_user else writer.temperature
        length += given is None
        if token_id in writer.end_ids and not waiting:
            length = 0
            if is_user:
                waiting.extend((each, TEMPLATE) for each in writer.answer)
            else:
                waiting.extend(writer.open_turn())
            is_user = bool(writer.answer) and not is_user


def test_a_chat_goes_on_with_a_turn_of_the_user_where_an_answer_ends():
    turns = [[(1, TEMPLATE), (50, GIVEN)], [(2, TEMPLATE)]]
    assert read(writer(turns=turns), [60, END, 70, 71, END, 61]) == [
        (1, TEMPLATE),
        (50, GIVEN),
        (60, USER),
        (END, USER),
        (8, TEMPLATE),
        (9, TEMPLATE),
        (70, OWN),
        (71, OWN),
        (END, OWN),
        (2, TEMPLATE),
        (61, USER),
    ]


def test_a_turn_that_does_not_end_is_ended():
    told = read(writer(turns=[[(1, TEMPLATE)]]), [60] * 1000)
    users = [token for token, origin in told if origin == USER]
    answers = [token for token, origin in told if origin == OWN]
    ends = [at for at, each in enumerate(told) if each == (END, TEMPLATE)]
    assert len(ends) >= 2
    assert len(users) + len(answers) == 1000
    assert max(after - end for end, after in pairwise(ends)) < 300


def test_a_writer_of_the_models_own_template_opens_a_chat(target, tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer = build_tokenizer(SIZE)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    chat = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=TEMPLATE_SOURCE,
    )
    makers = Writers(chat, code=["def f():\n    return 1\n" * 9], prose=["a b\n" * 9])
    end = tokenizer.token_to_id("<|im_end|>")
    chats = 0
    for seed in range(12):
        made = makers.make(random.Random(seed))
        told = read(made, [40, end, 41, end, 42])
        text = tokenizer.decode([token for token, _ in told], skip_special_tokens=False)
        if not text.startswith("<|im_start|>user"):
            assert {origin for _, origin in told} == {GIVEN, OWN}
            continue
        chats += 1
        parts = text.split("<|im_start|>")
        assert [part.split("\n")[0] for part in parts[1:]] == ["user", "assistant", "user"]
        assert all(part.endswith("<|im_end|>\n") for part in parts[1:3])
    assert 3 <= chats < 12


def test_the_chosen_tokens_are_the_most_probable_ones_and_the_ends(texts):
    chosen, share = choose_tokens(texts, count=20, always=(END, 299), vocabulary_size=SIZE)
    sums = torch.zeros(SIZE, dtype=torch.float64)
    at = texts.learnt()
    for ids, log_probs in zip(texts.best_ids[at], texts.best_log_probs[at], strict=True):
        sums[ids.long()] += log_probs.double().exp()
    others = [token for token in sums.argsort(descending=True).tolist() if token not in {END, 299}]
    assert chosen == tuple(sorted([END, 299, *others[:18]]))
    assert share == pytest.approx(float(sums[list(chosen)].sum() / sums.sum()))


def test_where_template_follows_nothing_is_learnt():
    origins = torch.tensor([[TEMPLATE, GIVEN, USER, TEMPLATE, OWN, OWN]], dtype=torch.uint8)
    ids = torch.zeros(1, 6, dtype=torch.int32)
    best = torch.zeros(1, 6, KEPT)
    made = Texts(ids, origins, best.int(), best.half())
    assert made.learnt().tolist() == [[True, True, False, True, True, False]]


def test_the_loss_is_the_cross_entropy_with_the_targets_probabilities(model, texts):
    drafter = Drafter(model, CHOICE)
    part = texts.rows(slice(2))
    at = part.learnt()
    log_probs = drafter.logits(part.token_ids, at).log_softmax(-1).detach()
    expected = []
    for row, (ids, known) in enumerate(
        zip(part.best_ids[at].tolist(), part.best_log_probs[at].float().exp().tolist(), strict=True)
    ):
        terms = [
            -prob * float(log_probs[row, CHOICE.token_ids.index(token)])
            for token, prob in zip(ids, known, strict=True)
            if token in CHOICE.token_ids
        ]
        expected.append(sum(terms))
    loss = float(drafter.loss(part).detach())
    assert loss == pytest.approx(sum(expected) / len(expected), rel=1e-3)


def test_accepted_tokens_are_counted_up_to_the_first_miss_and_the_end_of_the_text():
    hits = torch.tensor([True, True, False, True, True, True])
    counted = torch.tensor([True, True, True, True, True, False])
    runs = Runs.of(hits, counted)
    assert runs.lengths.tolist() == [2, 1, 0, 2, 1]
    assert runs.left.tolist() == [5, 4, 3, 2, 1]
    # One of five first tokens is wrong; two of the four blocks with a second token have it right.
    assert runs.accepted(2) == pytest.approx((4 / 5, 4 / 5 + 2 / 4))
    assert runs.by_place(2) == pytest.approx((4 / 5, 2 / 3))
    both = Runs.together([runs, Runs.of(~hits, counted)])
    assert both.accepted(1) == (1 / 2,)


def test_all_of_a_targets_layers_agree_with_it_everywhere(model, texts):
    reached = evaluate(Drafter(model, Choice((0, 1, 2, 3), tuple(range(SIZE)))), texts)
    assert reached.greedy > 0.95
    stored = texts.best_log_probs.float().exp().sum(-1)[texts.before(OWN)].mean()
    assert reached.sampled == pytest.approx(float(stored), rel=0.05)
    assert reached.accepted[0] == pytest.approx(reached.greedy)
    assert list(reached.accepted) == sorted(reached.accepted)


def training(folder, drafter, texts):
    return Training(
        drafter,
        texts=texts.rows(slice(16)),
        held_out=texts.rows(slice(16, 24)),
        seed=3,
        rows=4,
        rate=1e-3,
        longest_gradient=1.0,
        curve=folder / "curve.jsonl",
        clock=count().__next__,
    )


def test_a_drafter_learns_and_each_report_is_a_line_of_the_curve(model, texts, tmp_path):
    before = evaluate(Drafter(model, CHOICE), texts.rows(slice(16, 24)))
    told = []
    run = training(tmp_path, Drafter(model, CHOICE), texts)
    reached = run.train_for(40, report_seconds=15, keep=told.append)
    assert told[-1] == reached
    assert reached.loss < before.loss
    curve = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in curve] == [each.loss for each in told]
    # A second passes with each look at the clock: a step takes two, a report one more.
    assert [row["step"] for row in curve] == [8, 16, 19]


@pytest.fixture
def finished(model, texts, tmp_path):
    """The folder of a trained drafter's own weights."""
    chosen, _ = choose_tokens(texts, count=100, always=(END,), vocabulary_size=SIZE)
    drafter = Drafter(model, Choice((0, 3), chosen))
    run = training(tmp_path, drafter, texts)
    reached = run.train_for(6, report_seconds=9, keep=lambda _: None)
    card = reached.as_row(run.step)
    write_own(tmp_path / "own", drafter, embeddings=embeddings_digest(model), training=card)
    return tmp_path / "own"


def test_what_is_laid_out_is_served_and_drafts_what_was_trained(
    finished, target, model, texts, tmp_path
):
    lay_out(str(target), tmp_path / "drafter", own=finished)
    backend = TransformersBackend(str(tmp_path / "drafter"))
    whole = TransformersBackend(str(target)).description
    assert backend.description.tokenizer_fingerprint == whole.tokenizer_fingerprint
    assert backend.description.vocabulary_size == whole.vocabulary_size
    assert backend.description.layer_count == 2
    chosen = json.loads((finished / "draft_vocabulary.json").read_text())["token_ids"]
    assert len(chosen) == 100
    # What the library computes of the stored weights, with the tokens that are scored.
    own = shallow(copy.deepcopy(model), (0, 3))
    own.model.load_state_dict(load_file(finished / "drafter.safetensors"), strict=False)
    own.to(torch.bfloat16).float()
    text = ModelText(backend, SessionSpec(64))
    same = 0
    with torch.inference_mode():
        for row in texts.token_ids[:8, :20].tolist():
            logits = own(torch.tensor([row])).logits[0, -1, chosen]
            same += text.draft(array("I", row)).token_ids == (chosen[int(logits.argmax())],)
    assert same >= 7, "but for a near tie"


def test_a_drafter_holds_none_of_the_targets_embeddings(finished, model):
    stored = load_file(finished / "drafter.safetensors")
    assert {name.split(".")[0] for name in stored} == {"layers", "norm"}
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}
    card = json.loads((finished / CARD).read_text())
    assert card["embeddings"] == embeddings_digest(model)
    assert card["layers"] == [0, 3]
    assert card["training"]["step"] > 0


def test_it_is_refused_for_another_target(finished, model, tmp_path):
    other = tmp_path / "other"
    changed = LlamaForCausalLM(model.config)
    changed.save_pretrained(other)
    build_tokenizer(SIZE).save(str(other / "tokenizer.json"))
    with pytest.raises(OtherTargetError, match="another target"):
        lay_out(str(other), tmp_path / "drafter", own=finished)
    assert not (tmp_path / "drafter").exists()


def test_a_drafter_is_replaced_whole_or_not_at_all(finished, target, tmp_path):
    output = tmp_path / "models" / "drafter"
    lay_out(str(target), output, own=finished)
    (output / "of-a-former-one").touch()
    (finished / "draft_vocabulary.json").rename(finished / "away")
    with pytest.raises(FileNotFoundError):
        lay_out(str(target), output, own=finished)
    assert (output / "of-a-former-one").exists()
    (finished / "away").rename(finished / "draft_vocabulary.json")
    lay_out(str(target), output, own=finished)
    assert not (output / "of-a-former-one").exists()
    assert (output / "model.safetensors").exists()
    assert [*output.parent.iterdir()] == [output]


def test_a_card_counts_what_would_be_accepted(finished, target, tmp_path):
    lay_out(str(target), tmp_path / "drafter", own=finished)
    models = [TransformersBackend(str(folder)) for folder in (target, tmp_path / "drafter")]
    prompts = [[1, 2, 50], [9, 8, 3, 4]]
    itself = measure(models[0], models[0], prompts, tokens=12, sampling=SamplingParameters(1.0))
    assert itself["acceptance"] == 1
    assert itself["by_place"] == (1,) * 5
    assert itself["accepted"] == (1, 2, 3, 4, 5)
    row = measure(*models, prompts, tokens=12, sampling=SamplingParameters())
    plain = [ModelText(models[0], SessionSpec(64)) for _ in prompts]
    hits = []
    for prompt, deciding in zip(prompts, plain, strict=True):
        text, drafting = list(prompt), ModelText(models[1], SessionSpec(64))
        for _ in range(12):
            decided = deciding.judge(text).next_token
            hits.append(drafting.draft(text).token_ids == (decided,))
            text.append(decided)
            if decided == END:
                break
    assert row["tokens"] == len(hits)
    assert row["acceptance"] == pytest.approx(sum(hits) / len(hits))
    assert row["accepted"][0] == pytest.approx(row["acceptance"])


def many_writers():
    """48 writers of chats and other text, with turns of many lengths; some open with nothing."""
    chance = random.Random(6)

    def turn():
        return [(chance.randrange(10, 90), GIVEN) for _ in range(chance.choice((0, 1, 5, 30)))]

    return [
        Writer(
            0.5,
            iter([turn() for _ in range(200)]).__next__,
            answer=((8, 9), (), (8, END, 9))[row % 3],
            end_ids=(END,) if row % 2 else (END, 6),
        )
        for row in range(48)
    ]


def test_texts_led_in_tensors_are_those_that_their_writers_lead():
    chance, length = random.Random(5), 200
    drawn = torch.tensor(
        [
            # Few ends, so that some turns are as long as they may be.
            [
                chance.choice((END, 6) if chance.random() < row / 48 else (40, 41))
                for _ in range(length)
            ]
            for row in range(48)
        ]
    )
    rows = LedRows(rows=48, length=length, device=torch.device("cpu"))
    rows.begin([Script.of(each, length=length) for each in many_writers()])
    leading = [steps_of(each) for each in many_writers()]
    steps = [next(each) for each in leading]
    seen = set()
    for column in drawn.unbind(1):
        temperatures = rows.temperatures().tolist()
        token_ids, origins = rows.advance(column)
        for row, (given, origin, temperature) in enumerate(steps):
            token_id = int(column[row]) if given is None else given
            assert (int(token_ids[row]), int(origins[row])) == (token_id, origin)
            assert given is not None or temperature == temperatures[row]
            steps[row] = leading[row].send(token_id)
            seen.add((origin, token_id == END))
    assert len(seen) == 7, "every kind of token but a given end, in every kind of place"


def test_texts_that_are_written_on_the_device_are_the_targets(model):
    first, again, other = (written(model, length=70, seed=seed) for seed in (1, 1, 2))
    assert all(first[name].equal(again[name]) for name in first)
    assert not first["token_ids"].equal(other["token_ids"])
    with torch.inference_mode():
        expected = model(first["token_ids"].long()).logits.log_softmax(-1)
    there = expected.gather(-1, first["best_ids"].long())
    assert (first["best_log_probs"].float() - there)[there > -5].abs().mean() < 0.05
    assert (first["best_ids"][..., 0] == expected.argmax(-1)).float().mean() > 0.95
    own = first["origins"][:, 1:] == OWN
    is_best = first["token_ids"][:, 1:] == first["best_ids"][:, :-1, 0]
    assert is_best[::2][own[::2]].all()
    assert not is_best[1::2][own[1::2]].all()
    assert {*first["origins"].unique().tolist()} == {TEMPLATE, GIVEN, USER, OWN}


def test_drafters_that_are_made_at_once_are_put_together_as_others(target, model, tmp_path):
    folder = shutil.copytree(target, tmp_path / "chatting")
    (folder / "chat_template.jinja").write_text(TEMPLATE_SOURCE)
    distil_at_once.main(
        [
            *("--target", str(folder), "--output", str(tmp_path / "made"), "--device", "cpu"),
            *("--seconds", "1", "--rows", "16", "--length", "24", "--held-out-rows", "4"),
            *("--tokens", "100", "--layers", "0,3", "1", "--step-rows", "4"),
        ]
    )
    assert sorted(path.name for path in (tmp_path / "made").iterdir() if path.is_dir()) == [
        "layers-1",
        "layers-2",
    ]
    for name, layers in (("layers-1", [1]), ("layers-2", [0, 3])):
        card = json.loads((tmp_path / "made" / name / CARD).read_text())
        assert card["layers"] == layers
        assert card["embeddings"] == embeddings_digest(model)
        assert card["training"]["tokens"] == 12 * 24
        lay_out(str(folder), tmp_path / name, own=tmp_path / "made" / name)
        assert TransformersBackend(str(tmp_path / name)).description.layer_count == len(layers)


def test_texts_that_the_target_would_not_have_written_are_not_learnt_from(target, tmp_path):
    folder = shutil.copytree(target, tmp_path / "chatting")
    (folder / "chat_template.jinja").write_text(TEMPLATE_SOURCE)
    command = [
        *("--target", str(folder), "--output", str(tmp_path / "made"), "--device", "cpu"),
        *("--seconds", "1", "--rows", "16", "--length", "24", "--least-agreement", "1.1"),
    ]
    with pytest.raises(SystemExit, match="the texts are wrong"):
        distil_at_once.main(command)
    assert not (tmp_path / "made").exists()


def test_memory_that_lacks_halves_the_rows():
    tried = []

    def attempt(rows):
        tried.append(rows)
        if rows > 64:
            raise torch.OutOfMemoryError
        return rows

    assert distil_at_once.with_fewer_rows(256, attempt) == 64
    assert tried == [256, 128, 64]
    with pytest.raises(torch.OutOfMemoryError):
        distil_at_once.with_fewer_rows(256, lambda rows: attempt(rows + 100))
