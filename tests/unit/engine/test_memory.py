from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from paceline_engine.torch_backend.memory import FreeMemory, free_machine_bytes, free_memory

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


@pytest.fixture(autouse=True)
def eight_gib_are_available(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))


def free_bytes(root: Path, *, own: str = "0::/") -> int:
    membership = root / "membership"
    membership.write_text(f"4:memory:/elsewhere\n{own}\n")
    return free_machine_bytes(cgroups=root, membership=membership)


def limit(group: Path, *, most: str, used: int, inactive: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file 7\n")


def test_without_a_cgroup_it_is_what_the_machine_has(tmp_path):
    assert free_bytes(tmp_path) == 8 * GIB
    nowhere = tmp_path / "nowhere"
    assert free_machine_bytes(cgroups=nowhere, membership=nowhere) == 8 * GIB


def test_a_containers_limit_counts_and_files_that_were_read_do_not(tmp_path):
    limit(tmp_path, most=str(4 * GIB), used=3 * GIB, inactive=GIB)
    assert free_bytes(tmp_path) == 2 * GIB


def test_the_tightest_cgroup_around_the_process_counts(tmp_path):
    limit(tmp_path / "slice", most=str(2 * GIB), used=GIB)
    limit(tmp_path / "slice" / "service", most="max", used=GIB)
    limit(tmp_path / "other", most="1", used=0)
    assert free_bytes(tmp_path, own="0::/slice/service") == GIB


def test_a_cgroup_that_is_over_its_limit_has_nothing_left(tmp_path):
    limit(tmp_path, most="100", used=200)
    assert free_bytes(tmp_path) == 0


def test_of_a_machines_memory_half_is_counted_on_and_less_for_what_has_ended(monkeypatch):
    monkeypatch.setattr("paceline_engine.torch_backend.memory.free_machine_bytes", lambda: GIB)
    assert free_memory(torch.device("cpu")) == FreeMemory(GIB, 0.5, 0.25)


def test_a_limit_beyond_the_machine_changes_nothing(tmp_path):
    limit(tmp_path, most=str(100 * GIB), used=0)
    assert free_bytes(tmp_path) == 8 * GIB


def test_an_accelerator_counts_on_more_of_its_own_and_on_what_torch_keeps_of_it(monkeypatch):
    asked = []

    def answer(value):
        return lambda device: asked.append(device) or value

    accelerator = SimpleNamespace(
        mem_get_info=answer((50 * GIB, 80 * GIB)),
        memory_reserved=answer(26 * GIB),
        memory_allocated=answer(24 * GIB),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: accelerator)
    device = torch.device("cuda:1")
    assert free_memory(device) == FreeMemory(52 * GIB, 0.8)
    assert set(asked) == {device}
