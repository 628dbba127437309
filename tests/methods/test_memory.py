"""A server that remembers: what it makes of estimates, what it forgets, and what lies on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreseed.engine import ForeseedError
from foreseed.methods import memory as module
from foreseed.methods.memory import Memory
from foreseed.runs import checkpoint

N = 40


def world(devices: int, noise: float, seed: int = 0) -> Any:
    """Gradients of devices that differ, and a function that estimates one of them."""
    rng = np.random.default_rng(seed)
    gradients = rng.normal(size=(devices, N))
    return gradients, lambda device: gradients[device] + noise * rng.normal(size=N)


def errors(memory: Memory | None, noise: float, rounds: int, devices: int = 20, asked: int = 4) -> Any:
    """Squared errors of the rounds' means."""
    gradients, estimate = world(devices, noise)
    rng, weights = np.random.default_rng(1), np.full(asked, 1 / asked)
    found = []
    for number in range(1, rounds + 1):
        chosen = rng.choice(devices, asked, replace=False).tolist()
        estimates = corrected = [estimate(device) for device in chosen]
        if memory is not None:
            corrected = list(memory.corrected(chosen, estimates, weights))
            memory.remember(number, chosen, estimates, np.full(asked, 5.0))
        found.append(np.square(np.mean(corrected, axis=0) - gradients.mean(axis=0)).sum())
    return np.array(found)


def test_good_estimates_leave_no_noise_of_who_was_asked() -> None:
    memory = Memory.of(20, 4, [N], 10**6)
    remembered, plain = errors(memory, 0.0, 60), errors(None, 0.0, 60)
    # Once all devices were heard, nothing is left to be unsure of.
    assert (memory.slots >= 0).all()
    assert remembered[40:].max() < 1e-9 < plain[40:].min()
    assert memory.share == pytest.approx(1)


def test_estimates_that_are_all_noise_are_hardly_remembered() -> None:
    memory = Memory.of(20, 4, [N], 10**6)
    errors(memory, 300.0, 200)
    assert memory.share < 0.1


def test_share_is_between_and_lessens_the_error_where_noise_is_like_the_devices_differences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "HARM", 1.0)  # of least variance
    # Over seeds: the mean error with and without, against the spread of their difference.
    gains = []
    for seed in range(20):
        memory = Memory.of(20, 4, [N], 10**6)
        rng = np.random.default_rng(seed)
        gradients, weights = rng.normal(size=(20, N)), np.full(4, 1 / 4)
        with_, without = [], []
        for number in range(1, 101):
            chosen = rng.choice(20, 4, replace=False).tolist()
            estimates = [gradients[device] + 0.7 * rng.normal(size=N) for device in chosen]
            corrected = memory.corrected(chosen, estimates, weights)
            memory.remember(number, chosen, estimates, np.full(4, 5.0))
            if number > 40:
                truth = gradients.mean(axis=0)
                with_.append(np.square(np.mean(corrected, axis=0) - truth).sum())
                without.append(np.square(np.mean(estimates, axis=0) - truth).sum())
        assert 0.3 < memory.share < 0.9
        gains.append(np.mean(without) - np.mean(with_))
    assert np.mean(gains) > 4 * np.std(gains) / np.sqrt(len(gains)) > 0


def test_each_tensor_is_remembered_as_well_as_its_own_estimates_are() -> None:
    memory, rng = Memory.of(20, 4, [10, 500], 10**6), np.random.default_rng(0)
    gradients = rng.normal(size=(20, 510))
    noise = np.repeat([0.1, 10.0], [10, 500])
    for number in range(1, 101):
        chosen = rng.choice(20, 4, replace=False).tolist()
        estimates = [gradients[device] + noise * rng.normal(size=510) for device in chosen]
        memory.corrected(chosen, estimates, np.full(4, 1 / 4))
        memory.remember(number, chosen, estimates, np.full(4, 5.0))
    good, bad = memory.shares
    assert good > 0.99
    assert 0.2 < bad < 0.6


def test_a_device_heard_again_counts_for_a_share_of_what_is_remembered_of_it() -> None:
    memory = Memory.of(3, 2, [2], 10**6)
    memory.remember(1, [0, 1], [np.array([1.0, 2.0]), np.array([3.0, 4.0])], np.array([5.0, 1.0]), share=0.25)
    np.testing.assert_array_equal(memory.total, [8.0, 14.0])  # first words count whole
    memory.remember(2, [0], [np.array([9.0, -2.0])], np.array([2.0]), share=0.25)
    np.testing.assert_array_equal(memory.total, [2 * 3.0 + 3.0, 2 * 1.0 + 4.0])
    memory.remember(3, [0], [np.array([9.0, -2.0])], np.array([2.0]))
    np.testing.assert_array_equal(memory.total, [2 * 9.0 + 3.0, 2 * -2.0 + 4.0])


def test_noisy_estimates_leave_less_error_where_they_are_averaged() -> None:
    def mean_error(share: float) -> float:
        memory, rng = Memory.of(20, 4, [N], 10**6), np.random.default_rng(5)
        gradients, found = rng.normal(size=(20, N)), []
        for number in range(1, 301):
            chosen = rng.choice(20, 4, replace=False).tolist()
            estimates = [gradients[device] + 2 * rng.normal(size=N) for device in chosen]
            corrected = memory.corrected(chosen, estimates, np.full(4, 1 / 4))
            memory.remember(number, chosen, estimates, np.full(4, 5.0), share)
            found.append(np.square(np.mean(corrected, axis=0) - gradients.mean(axis=0)).sum())
        return float(np.mean(found[100:]))

    assert mean_error(0.2) < 0.8 * mean_error(1.0)


def test_device_never_heard_is_left_as_it_is() -> None:
    memory = Memory.of(3, 1, [2], 10**6)
    memory.remember(1, [0], [np.array([1.0, 2.0])], np.array([5.0]))
    given = np.array([7.0, 7.0])
    [corrected] = memory.corrected([1], [given], np.array([1.0]))
    np.testing.assert_array_equal(corrected, given)


def test_longest_unheard_is_forgotten_first_and_its_part_of_the_mean_goes() -> None:
    memory = Memory.of(4, 2, [2], 2 * 8)
    rows = {device: np.array([device, 10.0 * device]) for device in range(4)}
    memory.remember(1, [0, 1], [rows[0], rows[1]], np.array([1.0, 2.0]))
    memory.remember(2, [1], [rows[1]], np.array([2.0]))
    memory.remember(3, [3], [rows[3]], np.array([4.0]))
    assert memory.slots.tolist() == [-1, 1, -1, 0]
    np.testing.assert_allclose(memory.total, 2 * rows[1] + 4 * rows[3])


def test_restored_from_a_checkpoint_and_its_file_it_goes_on_the_same(tmp_path: Path) -> None:
    def rounds(memory: Memory, first: int, last: int) -> list[Any]:
        found = []
        for number in range(first, last + 1):
            rng = np.random.default_rng(number)
            chosen = sorted(rng.choice(6, 3, replace=False).tolist())
            estimates = list(rng.normal(size=(3, N)))
            found.append(np.array(memory.corrected(chosen, estimates, np.full(3, 1 / 3))))
            memory.remember(number, chosen, estimates, np.array([1.0, 2.0, 3.0]))
        return found

    whole = rounds(Memory.of(6, 3, [N], 4 * 4 * N), 1, 12)
    killed = Memory.of(6, 3, [N], 4 * 4 * N)
    killed.keep_in(tmp_path)
    rounds(killed, 1, 7)
    checkpoint.save(tmp_path / "state.npz", 7, killed)
    rounds(killed, 8, 8)  # its rows are in no checkpoint: they must not be seen
    del killed
    again = Memory.of(6, 3, [N], 4 * 4 * N)
    assert checkpoint.restore(tmp_path / "state.npz", again) == 7
    again.keep_in(tmp_path)
    np.testing.assert_array_equal(rounds(again, 8, 12), whole[7:])


def test_file_that_is_gone_is_told(tmp_path: Path) -> None:
    memory = Memory.of(4, 2, [2], 10**6)
    memory.keep_in(tmp_path)
    memory.remember(1, [0, 1], [np.ones(2), np.ones(2)], np.array([1.0, 2.0]))
    (tmp_path / "memory.f32").unlink()
    with pytest.raises(ForeseedError, match="start the run anew"):
        memory.keep_in(tmp_path)


def test_too_few_bytes_and_too_small_a_disk_are_told(tmp_path: Path) -> None:
    with pytest.raises(ForeseedError, match=r"train\.memory_bytes 100 has room for 0 estimates"):
        Memory.of(20, 4, [N], 100)
    huge = Memory.of(20, 4, [N], 10**6)
    huge.rows = np.broadcast_to(np.zeros((1, 1), np.float32), (10**9, 10**6))
    with pytest.raises(ForeseedError, match=r"lower train\.memory_bytes"):
        huge.keep_in(tmp_path)
    assert not list(tmp_path.iterdir())
