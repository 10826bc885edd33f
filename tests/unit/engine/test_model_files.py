from __future__ import annotations

import json
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from paceline_contract.limits import MOST_TOKENIZER_BYTES
from paceline_engine.model_files.files import find_model_files
from paceline_engine.model_files.weight_files import INDEX_FILE, hash_weights
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.torch_backend.memory import FreeMemory
from paceline_engine.torch_backend.model_loading import load_model

TOKENIZER_PARTS = ("pre_tokenizer", "decoder", "model")


@pytest.fixture
def directory(tiny_pair, tmp_path):
    return shutil.copytree(tiny_pair.drafter, tmp_path / "model")


def test_a_plain_directory_is_found(directory):
    files = find_model_files(str(directory))
    assert files.name == "model"
    assert [path.name for path in files.weights] == ["model.safetensors"]
    assert json.loads(files.tokenizer).keys() == {"version", "added_tokens", *TOKENIZER_PARTS}
    assert files.tokens.end_ids == (0,)


def test_a_directory_below_ones_home_has_its_own_name(directory, monkeypatch):
    monkeypatch.setenv("HOME", str(directory.parent))
    assert find_model_files("~/model").name == "model"


@pytest.mark.parametrize("name", ["modeling.py", "sub/hook.py", "kernel.so"])
def test_code_is_refused(directory, name):
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).touch()
    with pytest.raises(ModelLoadError, match="own code"):
        find_model_files(str(directory))


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "ckpt", "pkl"])
def test_pickled_weights_in_the_place_of_others_are_refused(directory, suffix):
    (directory / "model.safetensors").rename(directory / f"weights.{suffix}")
    with pytest.raises(ModelLoadError, match=rf"weights\.{suffix}: pickled .* convert to safetens"):
        find_model_files(str(directory))


def test_weights_by_another_name_alone_are_named(directory):
    (directory / "model.safetensors").rename(directory / "consolidated.safetensors")
    with pytest.raises(ModelLoadError, match=r"consolidated\.safetensors: not by these names"):
        find_model_files(str(directory))


def changed(path):
    """Change one number in a file of weights."""
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, path, metadata={"format": "pt"})


STRAY = {
    "pytorch_model.bin": b"a pickle",
    "consolidated.safetensors": b"cut off",
    "consolidated.00.pth": b"",
    "original/params.json": b"{",
    "original/consolidated.00.pth": b"",
    "onnx/model.onnx": b"",
    "optimizer.pt": b"",
    "trainer_state.json": b"version https://git-lfs.github.com/spec/v1\n",
    "adapter_config.json": b"no JSON",
    "tokenizer.model": b"",
}


@pytest.mark.parametrize("is_in_parts", [False, True])
def test_what_lies_beside_a_model_changes_nothing(directory, is_in_parts):
    if is_in_parts:
        shard(directory)
    before = find_model_files(str(directory))
    for name, content in STRAY.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    files = find_model_files(str(directory))
    assert files.fingerprint("float32") == before.fingerprint("float32")
    assert (files.weights, files.contents) == (before.weights, before.contents)
    load_model(files, dtype="float32")


def test_of_a_repository_what_its_index_names_is_fetched_and_nothing_else(
    directory, tmp_path, monkeypatch
):
    """The hub's own library chooses among the names; here a folder stands in for the hub."""
    shard(directory)
    for name, content in STRAY.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    snapshot = tmp_path / "snapshots" / "c0ffee"
    asked = []

    def snapshot_download(model, *, revision, allow_patterns):
        asked.append((model, revision))
        names = [str(it.relative_to(directory)) for it in directory.rglob("*") if it.is_file()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(directory / name, snapshot / name)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    found = find_model_files("somebody/model", revision="main")
    assert (found.name, found.revision) == ("somebody/model", "c0ffee")
    assert {path.name for path in snapshot.rglob("*")} == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "model-1.safetensors",
        "model-2.safetensors",
        INDEX_FILE,
    }
    # A branch may have moved on between the two calls.
    assert asked == [("somebody/model", "main"), ("somebody/model", "c0ffee")]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n"


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
        "model-2.safetensors",
    ],
)
def test_a_git_lfs_pointer_in_the_place_of_a_file_is_named_as_such(directory, name):
    shard(directory)
    (directory / name).write_bytes(POINTER)
    with pytest.raises(ModelLoadError, match=rf"{re.escape(name)} is a Git LFS pointer"):
        find_model_files(str(directory))


@pytest.mark.parametrize("kept", [0, 5, 8, 40, -1])
@pytest.mark.parametrize("name", ["model.safetensors", "model-2.safetensors"])
def test_a_file_of_weights_that_is_cut_off_is_named_as_such(directory, name, kept):
    if name != "model.safetensors":
        shard(directory)
    path = directory / name
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelLoadError, match=rf"{re.escape(name)} is cut off: it has \d+ bytes"):
        find_model_files(str(directory))


def test_a_file_of_weights_with_more_than_its_header_tells_is_refused(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is too long"):
        find_model_files(str(directory))


@pytest.mark.parametrize("text", ["<!DOCTYPE html><html>", '\n{"error": "Invalid token"}'])
def test_a_page_that_was_fetched_in_the_place_of_weights_is_named_as_such(directory, text):
    (directory / "model.safetensors").write_text(text)
    with pytest.raises(
        ModelLoadError, match=f"holds a text and no weights: .* '{text.strip()[:12]}"
    ):
        find_model_files(str(directory))


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        '{"a": 1}',
        '{"a": {"data_offsets": [0]}}',
        '{"a": {"data_offsets": [4, 0]}}',
        '{"a": {"data_offsets": ["0", 4]}}',
        '{"a": {"data_offsets": [0, 4]}, "b": {"data_offsets": [2, 4]}}',
        '{"a": {"data_offsets": [1, 4]}}',
    ],
)
def test_a_header_that_no_library_writes_is_refused(directory, header):
    content = len(header).to_bytes(8, "little") + header.encode() + bytes(4)
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: its header"):
        find_model_files(str(directory))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_auto_map_is_refused(directory, name):
    path = directory / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, "auto_map": {"AutoModel": "modeling.Evil"}}))
    with pytest.raises(ModelLoadError, match="auto_map"):
        find_model_files(str(directory))


def test_a_link_out_of_the_directory_is_refused(directory, tmp_path):
    (tmp_path / "secret.json").write_text("{}")
    (directory / "extra.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ModelLoadError, match="link"):
        find_model_files(str(directory))


def test_a_link_inside_the_directory_is_fine(directory):
    (directory / "alias.json").symlink_to(directory / "config.json")
    find_model_files(str(directory))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(directory, name):
    (directory / name).unlink()
    with pytest.raises(ModelLoadError, match=name.removeprefix("model")):
        find_model_files(str(directory))


def test_a_folder_of_models_is_not_taken_for_a_model(directory):
    (directory.parent / "train.py").touch()
    with pytest.raises(ModelLoadError, match=r"there is no config\.json in"):
        find_model_files(str(directory.parent))


def test_an_adapter_is_not_taken_for_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"a LoRA adapter: serve its model, with --lora"):
        find_model_files(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": None}, r"config\.json does not say model_type"),
        ({"hidden_act": "swiglu9"}, "the library does not know 'swiglu9', a word of its config"),
        ({"rope_scaling": {"type": "weird"}, "rope_parameters": None}, "does not know 'weird'"),
    ],
)
def test_what_the_library_does_not_know_is_named(directory, fields, reason):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ModelLoadError, match=reason):
        load_model(find_model_files(str(directory)), dtype="float32")


def test_broken_json_is_named(directory):
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        find_model_files(str(directory))


@pytest.mark.parametrize("content", ["null", "[]", "3", '"x"'])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_file_that_holds_no_object_is_named(directory, name, content):
    (directory / name).write_text(content)
    with pytest.raises(ModelLoadError, match=name):
        find_model_files(str(directory))


def test_a_missing_directory_is_not_looked_for_in_a_hub(tmp_path):
    with pytest.raises(ModelLoadError, match="no such directory"):
        find_model_files(str(tmp_path / "nothing"))


def test_the_dtype_and_the_weights_are_in_the_fingerprint(directory):
    before = find_model_files(str(directory)).fingerprint("float32")
    assert find_model_files(str(directory)).fingerprint("float32") == before
    assert find_model_files(str(directory)).fingerprint("bfloat16") != before
    changed(directory / "model.safetensors")
    assert find_model_files(str(directory)).fingerprint("float32") != before


def test_weights_in_more_parts_than_any_model_has_are_refused_unread(directory):
    (directory / "model.safetensors").write_bytes((9 << 20).to_bytes(8, "little"))
    with pytest.raises(ModelLoadError, match="its header has 9437184 bytes"):
        find_model_files(str(directory))


def shard(directory):
    """Split a model's weights in two parts with an index; return their names."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    halves = ["model-1.safetensors", "model-2.safetensors"]
    names = sorted(tensors)
    placed = {name: halves[number % 2] for number, name in enumerate(names)}
    for half in halves:
        part = {name: tensors[name] for name in names if placed[name] == half}
        save_file(part, directory / half, metadata={"format": "pt"})
    write_index(directory, placed)
    return placed


def write_index(directory, placed):
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": placed}))


def move_outside(directory, placed, name):
    """Move the first part to another place, which the index names."""
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / "model-1.safetensors").rename(directory / name)
    write_index(directory, {k: v.replace("model-1.safetensors", name) for k, v in placed.items()})


def test_a_model_in_parts_is_loaded_and_every_part_is_in_the_fingerprint(directory):
    whole = load_model(find_model_files(str(directory)), dtype="float32").state_dict()
    shard(directory)
    files = find_model_files(str(directory))
    assert [it.name for it in files.weights] == ["model-1.safetensors", "model-2.safetensors"]
    parts = load_model(files, dtype="float32").state_dict()
    assert all(parts[name].equal(tensor) for name, tensor in whole.items())
    before = files.fingerprint("float32")
    for path in files.weights:
        changed(path)
        now = find_model_files(str(directory)).fingerprint("float32")
        assert now != before
        before = now


@pytest.mark.parametrize("name", ["../outside.safetensors", "sub/w.safetensors", "model-1.bin"])
def test_an_index_that_names_what_lies_elsewhere_is_refused(directory, name):
    move_outside(directory, shard(directory), name)
    with pytest.raises(ModelLoadError, match=r"no name of a \.safetensors file beside it|pickled"):
        find_model_files(str(directory))


def test_a_part_that_lacks_a_weight_is_refused_with_few_of_the_names(directory):
    placed = shard(directory)
    write_index(
        directory, {**placed, **{f"z.{each:06}": "model-1.safetensors" for each in range(99)}}
    )
    with pytest.raises(ModelLoadError, match=r"model-1\.safetensors lacks z\.000000, .* 96 more"):
        find_model_files(str(directory))


def test_a_weight_that_two_parts_have_is_refused(directory):
    placed = shard(directory)
    both = {
        name: tensor
        for half in ("model-1.safetensors", "model-2.safetensors")
        for name, tensor in load_file(directory / half).items()
    }
    save_file(both, directory / "model-2.safetensors")
    write_index(directory, placed)
    with pytest.raises(ModelLoadError, match=r"model-2\.safetensors holds .* names in another"):
        find_model_files(str(directory))


def test_a_weight_that_no_part_is_said_to_hold_is_told_and_is_in_the_fingerprint(directory, caplog):
    placed = shard(directory)
    part = directory / "model-2.safetensors"
    before = find_model_files(str(directory)).fingerprint("float32")
    save_file(load_file(part) | {"left.over": torch.zeros(1)}, part, metadata={"format": "pt"})
    write_index(directory, placed)
    files = find_model_files(str(directory))
    assert "model-2.safetensors holds what" in caplog.text
    assert "left.over" in caplog.text
    load_model(files, dtype="float32")
    assert files.fingerprint("float32") != before


def test_a_left_over_weight_that_two_parts_have_is_refused(directory):
    placed = shard(directory)
    for part in ("model-1.safetensors", "model-2.safetensors"):
        held = load_file(directory / part) | {"left.over": torch.zeros(1)}
        save_file(held, directory / part, metadata={"format": "pt"})
    write_index(directory, placed)
    with pytest.raises(ModelLoadError, match=r"model-2\.safetensors holds left\.over, as another"):
        find_model_files(str(directory))


def test_a_part_that_is_missing_is_named(directory):
    shard(directory)
    (directory / "model-2.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-2\.safetensors: No such file"):
        find_model_files(str(directory))


def test_one_file_of_weights_beside_an_index_of_others_is_refused(directory):
    content = (directory / "model.safetensors").read_bytes()
    shard(directory)
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match="remove the one that is not the model"):
        find_model_files(str(directory))


def test_weights_that_are_no_part_are_neither_loaded_nor_in_the_fingerprint(directory, caplog):
    before = find_model_files(str(directory)).fingerprint("float32")
    shutil.copy(directory / "model.safetensors", directory / "consolidated.safetensors")
    files = find_model_files(str(directory))
    assert "not loaded, as they are no part: consolidated.safetensors" in caplog.text
    assert files.fingerprint("float32") == before


def test_weights_that_change_after_they_were_checked_are_not_loaded(directory, tmp_path):
    files = find_model_files(str(directory))
    other = Path(shutil.copy(directory / "model.safetensors", tmp_path / "other"))
    other.replace(directory / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors was changed while"):
        load_model(files, dtype="float32")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors was changed while"):
        files.fingerprint("float32")


def test_weights_are_hashed_once_and_beside_their_loading(directory, monkeypatch):
    threads = []

    def hashed(paths):
        threads.append(threading.current_thread())
        return hash_weights(paths)

    expected = find_model_files(str(directory)).fingerprint("float32")
    monkeypatch.setattr("paceline_engine.model_files.files.hash_weights", hashed)
    files = find_model_files(str(directory))
    load_model(files, dtype="float32")
    assert [files.fingerprint("float32"), files.fingerprint("float32")] == [expected] * 2
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_a_model_without_room_is_refused_before_a_weight_is_read(directory, monkeypatch):
    """Its weights are no numbers, which nobody finds out."""
    path = directory / "model.safetensors"
    tensors = {name: each * torch.nan for name, each in load_file(path).items()}
    save_file(tensors, path)
    needed = sum(each.numel() for each in tensors.values()) * 4
    limit = "paceline_engine.torch_backend.model_loading.free_memory"
    monkeypatch.setattr(limit, lambda _: FreeMemory(needed // 4, 0.5))
    missing = f"{(needed - needed // 4) / (1 << 30):.3g} GiB are missing; --dtype bfloat16"
    with pytest.raises(ModelLoadError, match=re.escape(missing)):
        load_model(find_model_files(str(directory)), dtype="float32")
    monkeypatch.setattr(limit, lambda _: FreeMemory(needed, 0.5))
    with pytest.raises(ModelLoadError, match="no numbers"):
        load_model(find_model_files(str(directory)), dtype="float32")


def test_a_configuration_that_changes_after_it_was_checked_is_loaded_as_it_was(directory):
    files = find_model_files(str(directory))
    before = files.fingerprint("float32")
    (directory / "config.json").write_text("{}")
    load_model(files, dtype="float32")
    assert files.fingerprint("float32") == before


def test_what_other_programs_would_load_from_the_directory_is_left_alone(directory):
    """An adapter beside a model, as the library takes it up by itself, would make another model."""
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "somebody/else"}
    (directory / "adapter_config.json").write_text(json.dumps(adapter))
    shown = {"config.json", "generation_config.json", "model.safetensors"}
    with find_model_files(str(directory)).laid_out() as seen:
        assert {path.name for path in seen.iterdir()} == shown


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"transformers_weights": "../outside.safetensors"}, "names other files of weights"),
        ({"text_config": {"auto_map": {"AutoModel": "x"}}}, "own code"),
        ({"attn_implementation": "somebody/kernels"}, "a program of a hub"),
        ({"parts": [{"_experts_implementation": {"": "somebody/kernels"}}]}, "a program of a hub"),
    ],
)
def test_a_configuration_that_names_what_nobody_has_checked_is_refused(directory, fields, reason):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ModelLoadError, match=reason):
        find_model_files(str(directory))


def test_a_model_in_the_hugging_face_cache_is_found_and_a_link_beyond_it_is_not(
    directory, tmp_path
):
    hub = tmp_path / "models--somebody--model"
    snapshot, blobs = hub / "snapshots" / "abc", hub / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in directory.iterdir():
        path.rename(blobs / f"of-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/of-{path.name}")
    load_model(find_model_files(str(snapshot)), dtype="float32")
    (tmp_path / "secret.json").write_text("{}")
    (snapshot / "extra.json").symlink_to("../../../secret.json")
    with pytest.raises(ModelLoadError, match="link"):
        find_model_files(str(snapshot))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer_config.json", "extra.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused_without_waiting(directory, name):
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    with pytest.raises(ModelLoadError, match=f"{re.escape(name)}: is not a regular file"):
        find_model_files(str(directory))


def test_a_tokenizer_that_orchestrators_would_refuse_is_refused_by_its_size(directory):
    with (directory / "tokenizer.json").open("ab") as file:
        file.truncate(MOST_TOKENIZER_BYTES + 1)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: has more than 268435456 bytes"):
        find_model_files(str(directory))


def test_a_deeply_nested_configuration_is_refused(directory):
    (directory / "generation_config.json").write_text("[" * 200_000)
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: not readable as JSON"):
        find_model_files(str(directory))


@pytest.mark.parametrize("is_missing", [True, False])
def test_many_foreign_weights_take_one_line_with_a_count(directory, is_missing, caplog, capfd):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    if is_missing:
        tensors = {next(iter(sorted(tensors))): next(iter(tensors.values()))}
    foreign = {f"foreign.{each:04}": torch.zeros(1) for each in range(2000)}
    save_file({**tensors, **foreign}, path, metadata={"format": "pt"})
    files = find_model_files(str(directory))
    if is_missing:
        with pytest.raises(ModelLoadError, match=r"its files lack .* more") as refused:
            load_model(files, dtype="float32")
        assert len(str(refused.value)) < 500
    else:
        load_model(files, dtype="float32")
        assert "2000 weights in its files are none of the model's" in caplog.text
    assert "foreign.1999" not in caplog.text + "".join(capfd.readouterr())
