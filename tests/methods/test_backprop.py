"""`LocalTrainer`: gradients and local training, against plain torch."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from foreseed import models
from foreseed.draws import Draws
from foreseed.engine import Engine, ProgramError, Samples, SamplesError, ValuesError
from foreseed.methods import backprop
from foreseed.methods.backprop import LocalTrainer, Trained
from tests.methods.small import CLASSES, digits, lenet, live_of, plain_losses, pruned, with_batch_norm
from tests.models.agreement import scramble
from tests.models.nets import Net

SETTINGS: dict[str, Any] = {
    "epochs": 2, "batch": 16, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.01, "seed": (0, 3, 5),
}  # fmt: skip


# --- gradients ---


@pytest.mark.parametrize("density", [1, 0.2])
def test_gradient_is_autograds_on_the_masked_model(density: float) -> None:
    model = lenet()
    program, values = pruned(model, density)
    images, labels = digits(40)
    gradients, loss = LocalTrainer(model, program).gradient(values, images, labels, [(0, 40)])

    models.restore(model, program, values)
    expected = plain_losses(model, program, images, labels).mean()
    expected.backward()
    whole = np.array(models.bind(model, program).gradient())
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    np.testing.assert_allclose(gradients, whole[None], rtol=1e-4, atol=1e-5 * np.abs(whole).max())


def test_gradient_predicts_the_differences_that_the_engine_measures() -> None:
    program, values = pruned(scramble(lenet()), 0.3)
    images, labels = digits(8)
    gradients, loss = LocalTrainer(lenet(), program).gradient(values, images, labels, [(0, 8)])
    records = np.concatenate([labels[:, None].astype(np.uint8), images.reshape(8, -1)], axis=1)
    samples, engine = Samples.records(records, program.image_bytes), Engine(program)
    step = (1e-3 * gradients[0] / np.linalg.norm(gradients[0])).astype(np.float32)
    ahead, behind = (engine.loss(values + sign * step, samples)[0] / 8 for sign in (1, -1))
    assert (ahead - behind) / 2 == pytest.approx(float(gradients[0] @ step), rel=1e-2)
    assert loss == pytest.approx(engine.loss(values, samples)[0] / 8, rel=1e-5)


def test_each_part_has_the_gradient_of_its_own_images() -> None:
    program, values = pruned(lenet(), 0.3)
    trainer, (images, labels) = LocalTrainer(lenet(), program), digits(30)
    parts = [(0, 7), (7, 11), (18, 12)]
    gradients, loss = trainer.gradient(values, images, labels, parts)
    alone = [trainer.gradient(values, images[a : a + n], labels[a : a + n], [(0, n)]) for a, n in parts]
    rows = np.array([g[0] for g, _ in alone])
    np.testing.assert_allclose(gradients, rows, rtol=1e-5, atol=1e-6 * np.abs(rows).max())
    assert loss == pytest.approx(sum(n * mean for (_, n), (_, mean) in zip(parts, alone, strict=True)) / 30)
    whole, _ = trainer.gradient(values, images, labels, [(0, 30)])
    np.testing.assert_allclose(np.array([7, 11, 12]) @ gradients / 30, whole[0], rtol=1e-4, atol=1e-6)


def test_gradient_does_not_depend_on_how_many_images_are_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program, values = pruned(lenet(), 1)
    trainer, (images, labels) = LocalTrainer(lenet(), program), digits(30)
    at_once, loss = trainer.gradient(values, images, labels, [(0, 30)])
    monkeypatch.setattr(backprop, "_CHUNK", 7)
    in_chunks, same_loss = trainer.gradient(values, images, labels, [(0, 30)])
    assert same_loss == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(in_chunks, at_once, rtol=1e-4, atol=1e-6)


def test_frozen_statistics_are_used_and_kept() -> None:
    model = scramble(with_batch_norm()).eval()
    program, values = pruned(model, 1)
    stats, (images, labels) = models.stats(model, program), digits(12)
    trainer = LocalTrainer(model, program)
    gradients, loss = trainer.gradient(values, images, labels, [(0, 12)], stats)
    expected = plain_losses(model, program, images, labels).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    whole = np.array(models.bind(model, program).gradient())
    np.testing.assert_allclose(gradients[0], whole, rtol=1e-4, atol=1e-5 * np.abs(whole).max())
    assert models.stats(trainer.model, program) == stats


def test_without_statistics_batch_norms_take_those_of_the_images() -> None:
    model = scramble(with_batch_norm()).train()
    program, values = pruned(model, 1)
    images, labels = digits(12)
    gradients, loss = LocalTrainer(model, program).gradient(values, images, labels, [(0, 12)])
    expected = plain_losses(model, program, images, labels).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    whole = np.array(models.bind(model, program).gradient())
    np.testing.assert_allclose(gradients[0], whole, rtol=1e-4, atol=1e-5 * np.abs(whole).max())


# --- training ---


def by_hand(model: nn.Module, values: Any, program: Any, images: Any, labels: Any, seed: Any, batch: int = 16) -> Any:
    """The training of `SETTINGS` with torch's own optimiser, on a model that holds the mask as a list of zeros."""
    masks = live_of(model, program)
    models.restore(model, program, values)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)
    draws = Draws(*seed, "minibatches")
    for _ in range(2):
        for rows in np.split(draws.permutation(len(images)), range(batch, len(images), batch)):
            optimiser.zero_grad()
            plain_losses(model, program, images[rows], labels[rows]).mean().backward()
            for name, p in model.named_parameters():
                p.grad *= masks[name]
            optimiser.step()
    return np.array(models.bind(model, program).read(), np.float32)


@pytest.mark.parametrize("density", [1, 0.2])
def test_training_is_torchs_sgd_to_the_bit(density: float) -> None:
    model = lenet().to(memory_format=torch.channels_last)
    program, values = pruned(model, density)
    images, labels = digits(40)
    trained = LocalTrainer(model, program).train(values, images, labels, **SETTINGS)
    np.testing.assert_array_equal(trained.values, by_hand(model, values, program, images, labels, (0, 3, 5)))
    assert trained.stats.size == 0


def test_training_moves_batch_norm_statistics_as_torch_does() -> None:
    model = scramble(with_batch_norm()).train().to(memory_format=torch.channels_last)
    program, values = pruned(model, 1)
    stats, (images, labels) = models.stats(model, program), digits(40)
    trained = LocalTrainer(model, program).train(values, images, labels, **SETTINGS, stats=stats)
    np.testing.assert_array_equal(trained.values, by_hand(model, values, program, images, labels, (0, 3, 5)))
    np.testing.assert_array_equal(trained.stats, models.stats(model, program))


def test_pruned_weights_never_move() -> None:
    model = scramble(lenet())
    program, values = pruned(model, 0.2)
    trainer, (images, labels) = LocalTrainer(model, program), digits(40)
    trained = trainer.train(values, images, labels, **SETTINGS)
    masks = live_of(model, program)
    for name, p in trainer.model.named_parameters():
        assert not p.detach()[masks[name] == 0].any()
    assert (trained.values != values).mean() > 0.9


def test_training_learns() -> None:
    program, values = pruned(lenet(), 0.3)
    trainer, (images, labels) = LocalTrainer(lenet(), program), digits(80)
    settings = SETTINGS | {"epochs": 10}
    first = trainer.train(values, images, labels, **settings)
    second = trainer.train(first.values, images, labels, **settings)
    _, unseen = trainer.gradient(second.values, *digits(40, seed=9), [(0, 40)])
    assert second.loss < 0.5 * first.loss
    assert unseen < 0.2


def test_loss_is_the_mean_over_all_images_as_they_came_up() -> None:
    program, values = pruned(lenet(), 0.3)
    trainer, (images, labels) = LocalTrainer(lenet(), program), digits(41)
    standing = trainer.train(values, images, labels, **SETTINGS | {"lr": 0.0, "weight_decay": 0.0})
    np.testing.assert_array_equal(standing.values, values)
    assert standing.loss == pytest.approx(trainer.gradient(values, images, labels, [(0, 41)])[1], rel=1e-6)


def test_order_of_images_follows_the_seed() -> None:
    program, values = pruned(lenet(), 0.3)
    trainer, (images, labels) = LocalTrainer(lenet(), program), digits(40)
    here, there = (trainer.train(values, images, labels, **SETTINGS | {"seed": (0, 3, d)}) for d in (5, 6))
    assert (here.values != there.values).any()


def same(a: Trained, b: Trained) -> bool:
    return a.values.tobytes() == b.values.tobytes() and a.stats.tobytes() == b.stats.tobytes() and a.loss == b.loss


@pytest.mark.parametrize("make", [lenet, with_batch_norm])
def test_training_is_the_same_bits_after_other_work_and_in_any_thread(make: Any) -> None:
    program, values = pruned(make(), 1)
    trainer, (images, labels) = LocalTrainer(make(), program), digits(40)
    first = trainer.train(values, images, labels, **SETTINGS)
    trainer.gradient(2 * values, *digits(20, seed=4), [(0, 20)])
    trainer.train(values, *digits(20, seed=5), **SETTINGS)
    assert same(first, trainer.train(values, images, labels, **SETTINGS))

    def in_thread(own: LocalTrainer) -> list[Trained]:
        return [own.train(values, images, labels, **SETTINGS) for _ in range(3)]

    with ThreadPoolExecutor(3) as pool:
        for results in pool.map(in_thread, [trainer.copy() for _ in range(3)]):
            assert all(same(first, result) for result in results)


def test_copy_is_independent() -> None:
    program, values = pruned(lenet(), 0.2)
    trainer, (images, labels) = LocalTrainer(lenet(), program), digits(20)
    twin = trainer.copy()
    result = twin.train(values, images, labels, **SETTINGS)
    kept = trainer.model.state_dict()
    moved = twin.model.state_dict()
    assert all((kept[name] != moved[name]).any() for name in kept)
    assert same(result, trainer.train(values, images, labels, **SETTINGS))


def test_model_given_is_only_read() -> None:
    model = lenet().train()
    before, weights = copy.deepcopy(model.state_dict()), [p.stride() for p in model.parameters()]
    program, values = pruned(model, 0.2)
    LocalTrainer(model, program).train(values, *digits(20), **SETTINGS)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.training
    assert weights == [p.stride() for p in model.parameters()]


def test_frozen_parameters_and_dropout_are_trained_as_the_program_has_them() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.Dropout(0.9), nn.ReLU(), nn.Linear(8, CLASSES))
    model[1].requires_grad_(False)
    program, values = pruned(model, 1)
    trainer, (images, labels) = LocalTrainer(model, program), digits(20)
    a, b = (trainer.train(values, images, labels, **SETTINGS) for _ in range(2))
    assert same(a, b)
    assert (a.values[: 256 * 8] != values[: 256 * 8]).any()


def test_model_that_flattens_by_view_can_be_trained() -> None:
    conv = nn.Conv2d(1, 4, 3)
    model = Net(lambda s, x: s.fc(s.conv(x).view(x.size(0), -1)), conv=conv, fc=nn.Linear(4 * 14 * 14, CLASSES))
    program, values = pruned(model, 0.5)
    images, labels = digits(40)
    trained = LocalTrainer(model, program).train(values, images, labels, **SETTINGS)
    np.testing.assert_array_equal(trained.values, by_hand(model, values, program, images, labels, (0, 3, 5)))


def test_images_that_cannot_be_written_to_are_taken() -> None:
    program, values = pruned(lenet(), 0.2)
    trainer, (images, labels) = LocalTrainer(lenet(), program), digits(20)
    free = trainer.train(values, images, labels, **SETTINGS)
    images.flags.writeable = labels.flags.writeable = values.flags.writeable = False
    assert same(free, trainer.train(values, images, labels, **SETTINGS))


# --- refusals ---


def test_what_does_not_fit_the_program_is_refused() -> None:
    program, values = pruned(lenet(), 0.2)
    trainer, (images, labels) = LocalTrainer(lenet(), program), digits(20)
    with pytest.raises(SamplesError, match=r"float64 images .* expected uint8 images of shape \(1, 16, 16\)"):
        trainer.train(values, images.astype(np.float64), labels, **SETTINGS)
    with pytest.raises(SamplesError, match=r"labels \(19,\).* a label for each"):
        trainer.train(values, images, labels[:19], **SETTINGS)
    with pytest.raises(SamplesError, match="labels from 4 to 7: the program has 4 classes, 0 to 3"):
        trainer.gradient(values, images, labels + 4 - labels.min(), [(0, 20)])
    with pytest.raises(SamplesError, match=r"parts \[\(0, 0\)\] of 0 images"):
        trainer.train(values, images[:0], labels[:0], **SETTINGS)
    for parts in ([], [(0, 20), (20, 1)], [(-1, 5)]):
        with pytest.raises(SamplesError, match="of 20 images: expected parts"):
            trainer.gradient(values, images, labels, parts)
    with pytest.raises(ValuesError, match="expected"):
        trainer.train(values[1:], images, labels, **SETTINGS)
    with pytest.raises(ProgramError, match="was not compiled from this Sequential"):
        LocalTrainer(with_batch_norm(), program)


def test_training_that_diverges_is_refused() -> None:
    program, values = pruned(lenet(), 1)
    trainer, (images, labels) = LocalTrainer(lenet(), program), digits(40)
    with pytest.raises(ValuesError, match="lower the learning rate"):
        trainer.train(values, images, labels, **SETTINGS | {"lr": 1e6})
    with pytest.raises(ValuesError, match="lower the learning rate"):
        trainer.gradient(values + np.float32(np.inf), images, labels, [(0, 40)])
