"""What there is to use, and what was used."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from bigbatch.errors import ConfigurationError
from bigbatch.memory import budget as budget_module
from bigbatch.memory.budget import budget, host_available, human, resident, room
from bigbatch.memory.meter import Stage
from tests.support.messages import approve

GIB = 1 << 30


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("20GiB", 20 * GIB),
        ("20 GB", 20 * 10**9),
        ("20gib", 20 * GIB),
        ("20G", 20 * GIB),
        ("1.5TiB", 3 * 2**39),
        (24e9, 24 * 10**9),
        *((half, room("cpu").total // 2) for half in (0.5, "50%", "50 %")),
    ],
)
def test_bytes_as_people_write_them(written: float | str, size: int) -> None:
    """Units of 1,000 and of 1,024 are told apart; a fraction is of the whole device, by default all that is free."""
    assert budget(written, "cpu") == size
    assert resident() < budget(None, "cpu") <= room("cpu").total


@pytest.mark.parametrize("written", [True, -1, 0.0, float("nan"), 20, 1.5, "20", "20 parsecs", "120%", "0GiB", [1]])
def test_what_cannot_be_meant_is_refused(written: object) -> None:
    """The error restates what was written and shows how to write it."""
    with pytest.raises(ConfigurationError, match=r'is neither a fraction[\s\S]*Use: memory="20GiB"'):
        budget(written, "cpu")  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about its absence")
def test_a_device_that_is_not_there() -> None:
    """It says what to write instead."""
    with pytest.raises(ConfigurationError) as caught:
        budget(None, "cuda")
    approve("memory", "no cuda", caught.value)


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_is_the_limit(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest group around the process counts, and old files in its cache do not."""
    group = tmp_path / "memory" / "a" / "b" if version == 1 else tmp_path / "a" / "b"
    group.mkdir(parents=True)
    limit, used, stat = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if version == 1
        else ("memory.max", "memory.current", "inactive_file")
    )
    (group / limit).write_text("max\n")
    (group.parent / limit).write_text(f"{64 << 20}\n")
    (group.parent / used).write_text(f"{40 << 20}\n")
    (group.parent / "memory.stat").write_text(f"anon 1\n{stat} {10 << 20}\n")
    own = tmp_path / "cgroup"
    own.write_text("9:name=systemd:/\n4:memory:/a/b\n" if version == 1 else "0::/a/b\n")
    monkeypatch.setattr(budget_module, "_CGROUPS", tmp_path)
    monkeypatch.setattr(budget_module, "_OWN_CGROUPS", own)
    assert room("cpu").total == 64 << 20
    assert host_available() == 34 << 20


def test_a_machine_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Linux's files there are still numbers."""
    monkeypatch.setattr(budget_module, "_MEMINFO", tmp_path / "none")
    monkeypatch.setattr(budget_module, "_OWN_CGROUPS", tmp_path / "none")
    assert 0 < host_available() <= room("cpu").total


def test_bytes_for_people() -> None:
    """Three digits, in the unit that fits."""
    assert list(map(human, [0, 1536, 150 << 20, 2048 * GIB])) == ["0 B", "1.5 KiB", "150 MiB", "2,048 GiB"]


def stage(device: str = "cpu", limit: int | None = None, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Stage:
    """A place to probe, of no model."""
    return Stage((), optimizers, None, torch.device(device), limit)


def peak(on: Stage, run: Callable[[], object] = lambda: None) -> int:
    """The most bytes that an action holds."""
    return on.rehearse(1, run).peak_bytes or 0


def test_a_probe_counts_what_lives_at_once() -> None:
    """What was freed before the peak is not in it; what was there before is, and the optimizer's state to come."""
    here, mib = stage(), torch.ones(1 << 18)

    def action() -> None:
        first = mib + 1
        second = first + 1
        del first
        _ = second + 1

    assert peak(here, action) - peak(here) == 2 << 20
    large = nn.Parameter(torch.ones(1 << 22))
    awaited = peak(stage(optimizers=[torch.optim.Adam([large])]))
    assert awaited - peak(stage()) == pytest.approx(2 * large.nbytes, rel=0.3)


def test_a_probe_stops_at_its_limit() -> None:
    """Forward or backward: before the memory is used up."""
    model = nn.Sequential(*itertools.chain.from_iterable((nn.Linear(64, 64), nn.ReLU()) for _ in range(20)))

    def run() -> None:
        model(torch.ones(512, 64)).sum().backward()

    room_for = peak(stage(), run) - peak(stage())
    assert stage(limit=resident() + room_for // 2).rehearse(1, run).peak_bytes is None


@pytest.mark.cuda
def test_a_gpus_peak_is_its_allocators() -> None:
    """With what was there before, and with its cache."""
    elsewhere = torch.cuda.memory_allocated("cuda:0")
    before = torch.ones(1 << 20, device="cuda:0")
    found = peak(stage("cuda:0"), lambda: (before + 1).sum() + 1)
    assert found - elsewhere >= 8 << 20
    assert found >= torch.cuda.max_memory_allocated("cuda:0")
    free, total = torch.cuda.mem_get_info("cuda:0")
    assert free < budget(None, "cuda:0") <= total


@pytest.mark.cuda
def test_a_gpus_share_is_respected() -> None:
    """A process that was given a fraction plans with it."""
    torch.cuda.set_per_process_memory_fraction(0.25, "cuda:0")
    try:
        assert budget(None, "cuda:0") <= 0.25 * torch.cuda.mem_get_info("cuda:0")[1]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, "cuda:0")
