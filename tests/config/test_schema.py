import pickle
import tomllib

import pytest
from hypothesis import given, settings

from foreseed.config import Config, ConfigError, load, methods
from foreseed.config.errors import fields
from foreseed.config.schema import DATA_SETS, MODELS, Prune
from foreseed.engine.errors import ForeseedError
from tests.config.strategies import configs

quick = settings(deadline=None, max_examples=60)


def refusal(overrides):
    with pytest.raises(ConfigError) as caught:
        Config().with_(overrides)
    return str(caught.value)


@quick
@given(configs)
def test_a_written_config_loads_back_equal(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert load(path) == config


@quick
@given(configs)
def test_a_written_config_holds_every_key_and_nothing_else(config):
    assert tomllib.loads(config.to_toml()) == config.model_dump()


def test_every_key_says_its_trade_off_in_a_line():
    text = Config().to_toml()
    for key, field in fields(Config):
        assert field.description, key
        assert f"# {field.description}\n" in text
    assert max(map(len, text.splitlines())) <= 130


def test_the_defaults_are_the_documented_ones():
    config = Config()
    assert (config.method, config.seed, config.rounds, config.eval_every) == ("ntk-baffle", 0, 300, 10)
    assert (config.workers, config.engine, config.name) == (0, "difference", "")
    assert config.data.model_dump() == {
        "set": "digits", "root": "", "size": 0, "channels": 0, "partition": "dirichlet", "beta": 0.3,
        "classes_per_device": 2, "devices": 20, "per_round": 10, "min_size": 10,
    }  # fmt: skip
    assert config.model.model_dump() == {
        "name": "lenet5", "activation": "hardswish", "norm": "group", "init": "kaiming", "weights": "",
    }  # fmt: skip
    assert config.prune.model_dump() == {
        "pruner": "ntk-rand", "density": 0.1, "iterations": 50, "redraws": 5, "redraw_weights": True,
        "batch": 100, "epsilon": 0.01, "cost": "none", "cost_power": 0.2, "rescale": True,
    }  # fmt: skip
    assert config.train.model_dump() == {
        "k": 50, "sigma": 1e-4, "direction": "gaussian", "seeds": "per-device", "spread": 1, "blocks": 1,
        "bytes_up": 256, "passes": 51, "difference": "forward", "local_steps": 1, "local_lr": 0.01, "bits": 32,
        "optimiser": "sgd", "lr": 0.01, "momentum": 0.9,
        "weight_decay": 0.0, "lr_decay": 0.995, "schedule": "decay", "warmup": 0, "clip": 10.0, "rate": "fixed",
        "memory": False, "memory_bytes": 2**30, "nesterov": False, "restarts": False, "robust": "clip", "trim": 0.1,
        "ema": 0.0, "epochs": 1, "batch": 32,
    }  # fmt: skip
    assert config.fleet.model_dump() == {
        "sample": "present", "deadline": 60.0, "extra": 0, "min_replies": 1, "gather": 10.0, "rest_after": 3,
        "rest_rounds": 10, "max_share": 0.3, "replay_numbers": 50_000_000,
    }  # fmt: skip


@pytest.mark.parametrize("bad", [0, 3, 16, True, 1.0, "one"])
def test_bits_are_those_that_a_reply_can_have(bad):
    with pytest.raises(ConfigError, match="expected one of 1, 2, 4, 8, 32"):
        Config().with_({"train.bits": bad})


def test_blocks_do_not_go_with_local_steps():
    said = refusal({"train.blocks": 5, "train.local_steps": 2})
    assert said.startswith("train.local_steps = 2, expected 1 with train.blocks above 1: a device's own steps go along")


@pytest.mark.parametrize("key", ["train.memory=false", "train.momentum=0", "train.optimiser=adam"])
def test_nesterov_needs_a_momentum_and_devices_that_do_not_replay(key):
    load(None, ["train.memory=true", "train.nesterov=true"])
    with pytest.raises(ConfigError, match="expected false: true only with"):
        load(None, ["train.memory=true", "train.nesterov=true", key])


@pytest.mark.parametrize("key", ["train.momentum=0", "train.optimiser=adam"])
def test_restarts_need_a_momentum(key):
    load(None, ["train.restarts=true"])
    with pytest.raises(ConfigError, match=r"train\.restarts = true, expected false: true only with"):
        load(None, ["train.restarts=true", key])


def test_rates_by_layer_need_devices_that_do_not_replay():
    load(None, ["train.memory=true", "train.rate=layers"])
    with pytest.raises(ConfigError, match=r'train\.memory = false, expected true with train\.rate = "layers"'):
        load(None, ["train.rate=layers"])


def test_few_bits_do_not_go_with_local_steps():
    assert Config().with_({"train.bits": 1}).train.bits == 1
    said = refusal({"train.bits": 1, "train.local_steps": 2})
    assert said.startswith("train.bits = 1, expected 32: train.bits below 32 only with train.local_steps = 1, since")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("method", "is_bp", "density"),
    [("ntk-baffle", False, 0.2), ("baffle", False, 1.0), ("fedavg", True, 1.0), ("ntk-fedavg", True, 0.2)],
)
def test_the_method_decides_backpropagation_and_pruning(method, is_bp, density):
    config = Config().with_({"method": method, "prune.density": 0.2})
    assert config.is_bp is is_bp
    assert config.effective_density == density
    assert config.is_pruned is (density < 1)


def test_a_density_of_one_prunes_nothing():
    assert not Config().with_({"method": "ntk-baffle", "prune.density": 1.0}).is_pruned


def test_a_run_is_named_after_its_method_unless_it_has_a_name():
    assert Config().with_({"method": "baffle"}).run_name == "baffle"
    assert Config().with_({"name": "mine"}).run_name == "mine"


def test_a_copy_with_changes_keeps_the_rest_and_the_original():
    config = Config().with_({"train.k": 70, "data.beta": 5.0})
    copy = config.with_({"seed": 1, "method": "baffle", "train": {"lr": 0.5}})
    assert (copy.seed, copy.method, copy.train.lr) == (1, "baffle", 0.5)
    assert (copy.train.k, copy.data.beta) == (70, 5.0)
    assert (config.seed, config.method, config.train.lr) == (0, "ntk-baffle", 0.01)


def test_a_config_cannot_be_changed_and_travels_to_workers():
    config = Config().with_({"seed": 3})
    with pytest.raises(ValueError, match="frozen"):
        config.train.k = 3
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("data.beta", 0.0), ("data.devices", 0), ("data.per_round", 0), ("data.min_size", 0),
        ("data.classes_per_device", 0), ("prune.density", 0.0), ("prune.density", 1.1), ("prune.iterations", 0),
        ("prune.redraws", 0), ("prune.batch", 0), ("prune.epsilon", 0.0), ("train.k", 0), ("train.sigma", 0.0),
        ("train.spread", 0), ("train.local_steps", 0), ("train.local_lr", 0.0), ("train.lr", 0.0),
        ("train.momentum", 1.0), ("train.momentum", -0.1), ("train.weight_decay", -1.0), ("train.lr_decay", 0.0),
        ("train.lr_decay", 1.1), ("train.clip", -1.0), ("train.ema", 1.0), ("train.epochs", 0), ("train.batch", 0),
        ("rounds", 0), ("eval_every", 0), ("workers", -1), ("seed", -1), ("seed", 2**63),
        ("train.lr", float("inf")), ("train.lr", float("nan")), ("train.lr", True), ("rounds", True),
        ("rounds", 300.0), ("rounds", "300"), ("prune.rescale", 1), ("name", 5), ("train.k", 10**30),
    ],
)  # fmt: skip
def test_a_value_out_of_bounds_or_of_another_type_is_refused_by_key(key, bad):
    message = refusal({key: bad})
    assert message.startswith(f"{key} = ")
    assert "expected " in message
    assert len(message) < 200


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data.devices": 5}, "data.per_round = 10, expected at most data.devices, which is 5"),
        ({"train.k": 4, "train.spread": 5}, "train.spread = 5, expected at most train.k, which is 4"),
        ({"train.momentum": 1.5}, "train.momentum = 1.5, expected a number at least 0 and below 1"),
        ({"train.lr": "fast"}, 'train.lr = "fast", expected a number above 0 and at most 1000000000'),
        (
            {"method": "ntk-bafle"},
            f'method = "ntk-bafle", expected one of {", ".join(methods())}; did you mean ntk-baffle?',
        ),
        ({"train.optimiser": "SGD"}, 'train.optimiser = "SGD", expected one of sgd, adam; did you mean sgd?'),
        ({"prune.rescale": "True"}, 'prune.rescale = "True", expected true or false; did you mean true?'),
        ({"train.direction": "xyz"}, 'train.direction = "xyz", expected one of gaussian, rademacher'),
        ({"train": 5}, "train = 5, expected a table"),
        ({"train.k": [1]}, "train.k = a list, expected an integer at least 1 and at most 4294967295"),
        (
            {"model.name": "lenet-5"},
            'model.name = "lenet-5", expected one of lenet5, lenet5-wide, resnet20, mobilenetv2-tiny, '
            "mobilenetv3-small, squeezenet, dscnn, lenet-baffle, or package.module:factory; "
            "did you mean lenet5?",
        ),
        (
            {"data.set": "cifar"},
            'data.set = "cifar", expected one of digits, mnist, fashion-mnist, cifar10, cifar100, or a path such as '
            "./folder or file.npz; did you mean cifar10?",
        ),
        ({"data.root": "a\nb"}, r'data.root = "a\nb", expected text of printable characters'),
        (
            {"model.colour": 1},
            "unknown key model.colour, expected one of name, activation, norm, init, weights",
        ),
        (
            {"model.activatoin": "relu"},
            "unknown key model.activatoin, expected one of name, activation, norm, init, weights; "
            "did you mean model.activation?",
        ),
        (
            {"model.density": 1},
            "unknown key model.density, expected one of name, activation, norm, init, weights; "
            "did you mean prune.density?",
        ),
        (
            {"prune.batc": 1},
            "unknown key prune.batc, expected one of pruner, density, iterations, redraws, redraw_weights, batch, "
            "epsilon, cost, cost_power, rescale; did you mean prune.batch?",
        ),
        (
            {"batch": 1},
            f"unknown key batch, expected one of {', '.join(Config.model_fields)}; did you mean prune.batch or "
            "train.batch?",
        ),
    ],
)
def test_a_refusal_says_what_was_given_what_is_valid_and_what_is_near(overrides, message):
    assert refusal(overrides) == message


def test_the_other_keys_to_correct_are_named_too():
    assert refusal({"train.k": 0, "data.beta": -1, "x": 1}).endswith("(also to correct: train.k, x)")


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", ".hidden", "-x", "a b", "x" * 101])
def test_a_name_is_one_folder(name):
    assert "expected a folder's name" in refusal({"name": name})


@pytest.mark.parametrize("text", ["a\x00b", "a\nb", "\udcff"])
def test_a_refusal_stays_on_one_line_whatever_was_given(text):
    for overrides in ({"data.root": text}, {text: 1}, {"method": text}):
        assert refusal(overrides).isprintable()


def test_a_config_made_in_python_is_refused_like_a_file():
    with pytest.raises(ForeseedError, match=r"^train\.k = 0, expected an integer"):
        Config(train={"k": 0})
    with pytest.raises(ForeseedError, match="a config of type int, expected a table"):
        Config.model_validate(5)


def test_the_names_are_those_of_the_rooms_that_own_them():
    from foreseed.data import SETS
    from foreseed.models import MODELS as BUILDABLE
    from foreseed.prune import PRUNERS

    assert tuple(SETS) == DATA_SETS
    assert tuple(BUILDABLE) == MODELS
    assert Prune.model_fields["pruner"].annotation.__args__ == tuple(PRUNERS)
