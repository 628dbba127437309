import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foreseed.config import Config, ConfigError, load


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(path, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


def outcome(path, overrides=()):
    """The config, or the refusal; any other error is the loader's fault."""
    try:
        return load(path, overrides)
    except ConfigError as error:
        return str(error)


def test_nothing_given_is_all_defaults():
    assert load() == load(None, []) == Config()


def test_a_file_sets_its_keys_and_overrides_win(write):
    path = write("a.toml", 'seed = 3\nmethod = "baffle"\n[train]\nk = 7\nlr = 1\n')
    config = load(str(path), ["train.k=9", "data.beta=0.5"])
    assert (config.seed, config.method, config.train.k, config.data.beta) == (3, "baffle", 9, 0.5)
    assert isinstance(config.train.lr, float)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.k=100", 100),
        (" train.k = 1_00 ", 100),
        ("train.sigma=1e-3", 1e-3),
        ("train.lr=1", 1.0),
        ("prune.rescale=false", False),
        ("method=fedavg", "fedavg"),
        ('method="fedavg"', "fedavg"),
        ("name=2024", "2024"),
        ("name=2024-01-31", "2024-01-31"),
        ("name=true", "true"),
        ("name=", ""),
        ("data.root=/data=sets/a#b", "/data=sets/a#b"),
        (r"data.root=C:\new", r"C:\new"),
    ],
)
def test_an_override_is_a_toml_value_or_else_text(override, value):
    config = load(None, [override])
    at = config
    for part in override.partition("=")[0].strip().split("."):
        at = getattr(at, part)
    assert at == value
    assert type(at) is type(value)


def test_the_last_override_wins():
    assert load(None, ["seed=1", "seed=2"]).seed == 2


def test_a_refusal_names_the_place_where_the_value_stands(write):
    write("base.toml", "[train]\nlr = -1.0\nk = 5\n")
    path = write("a.toml", 'extends = "base.toml"\nrouns = 3\n[data]\nbeta = 0\n')
    assert refusal(path).startswith(f"{path}: data.beta = 0, expected a number above 0")
    assert refusal(path).endswith("(also to correct: train.lr, rouns)")
    assert refusal(path, ["data.beta=1"]).startswith(f"{path.parent / 'base.toml'}: train.lr = -1.0, expected")
    assert refusal(path, ["data.beta=1", "train.lr=1"]) == (
        f"{path}: unknown key rouns, expected one of {', '.join(Config.model_fields)}; did you mean rounds?"
    )
    assert refusal(None, ["train.k=0"]).startswith("command line: train.k = 0, expected")
    assert refusal(None, ["trian.k=0"]).startswith("command line: unknown key trian, expected")
    assert refusal(None, ["data.devices=5"]).startswith("by default: data.per_round = 10, expected at most")


def test_a_default_that_no_longer_fits_is_refused_with_the_file(write):
    path = write("a.toml", "[data]\ndevices = 5\n")
    assert refusal(path) == f"{path}, by default: data.per_round = 10, expected at most data.devices, which is 5"


@pytest.mark.parametrize("override", ["train.k", "=5", "", "="])
def test_an_override_without_key_or_value_is_refused(override):
    assert refusal(None, [override]) == f"command line: {override!r}, expected key=value, such as train.k=100"


def test_an_override_cannot_smuggle_in_more_keys():
    assert 'method = "1\\nseed = 2"' in refusal(None, ["method=1\nseed = 2"])


def test_a_file_extends_others_relative_to_itself_key_by_key(write):
    write("root.toml", "seed = 1\nrounds = 5\n[train]\nk = 2\nlr = 0.5\n")
    write("sub/middle.toml", 'extends = "../root.toml"\nseed = 2\n[train]\nk = 3\n')
    config = load(write("leaf.toml", 'extends = "sub/middle.toml"\n[train]\nmomentum = 0.0\n'))
    assert (config.seed, config.rounds) == (2, 5)
    assert (config.train.k, config.train.lr, config.train.momentum) == (3, 0.5, 0.0)


def test_files_that_extend_each_other_are_refused(write):
    itself = write("itself.toml", 'extends = "itself.toml"')
    assert "which extends it in turn" in refusal(itself)
    write("a.toml", 'extends = "b.toml"')
    assert "which extends it in turn" in refusal(write("b.toml", 'extends = "a.toml"'))


def test_a_base_that_is_missing_or_no_path_is_refused_with_the_file_that_wants_it(write):
    path = write("a.toml", 'extends = "gone.toml"')
    assert refusal(path).startswith(f"{path}: extends {path.parent / 'gone.toml'}: cannot be read (No such file")
    path = write("b.toml", "extends = 5")
    assert refusal(path) == f'{path}: extends = 5, expected one path in quotes, such as "base.toml"'


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    assert refusal(tmp_path / "gone.toml").startswith(f"{tmp_path / 'gone.toml'}: cannot be read (No such file")
    assert f"{tmp_path}: neither a file nor an experiment that comes with foreseed" in refusal(tmp_path)


def test_a_file_that_is_not_toml_is_refused_with_the_line(write):
    path = write("a.toml", "seed = 1\nrounds 5\n")
    assert refusal(path).startswith(f"{path}: not TOML: ")
    assert "line 2" in refusal(path)


def test_a_byte_order_mark_does_no_harm(tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xef\xbb\xbfseed = 1\r\n")
    assert load(path).seed == 1


@settings(deadline=None)
@given(st.binary(max_size=60))
@example(b"seed = " + b"9" * 5000)
@example(b"seed = 0x" + b"f" * 5000)
@example(b"seed = " + b"[" * 5000)
@example(b"\xff\xfe")
@example(b"data = 5\ndata.beta = 1")
@example(b"[[train]]\nk = 1")
def test_no_file_breaks_the_loader(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "a.toml"
    path.write_bytes(content)
    result = outcome(path)
    assert isinstance(result, Config) or str(path) in result


@settings(deadline=None)
@given(st.text(max_size=30), st.sampled_from(["", "seed=", "name=", "train.k=", "train=", "data.root=", "a.b.c="]))
@example("{k=1}", "train=")
@example("{a=" * 500, "train=")
@example("[" * 5000, "seed=")
@example("0x" + "f" * 5000, "seed=")
def test_no_override_breaks_the_loader(text, key):
    result = outcome(None, [key + text])
    assert isinstance(result, Config) or result.startswith("command line: ")


EXPERIMENTS = Path(__file__).parents[2] / "experiments"
FILES = sorted(EXPERIMENTS.rglob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_experiment_loads_and_opens_with_its_command(path):
    config = load(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].split("     ")[0] == f"# foreseed run {path.relative_to(EXPERIMENTS).with_suffix('').as_posix()}"
    for line in lines:
        if "=" in line and not line.startswith(("#", "extends")):
            assert "  # " in line, f"{line}: no comment on its trade-off"
    if config.data.set.startswith("cifar"):
        assert f"foreseed data get {config.data.set})" in lines[0]


def test_the_paper_s_experiments_differ_as_the_paper_says():
    names = {path.stem for path in FILES if path.parent.name == "paper"}
    arms = [
        (data, model, k) for data in ("cifar10", "cifar100") for model in ("lenet5", "resnet20") for k in (50, 100, 200)
    ]
    assert names >= {f"{data}-{model}-k{k}" for data, model, k in arms} | {
        "pruning-cifar10-lenet5",
        "pruning-cifar100-resnet20",
    }
    for data, model, k in arms:
        config = load(EXPERIMENTS / "paper" / f"{data}-{model}-k{k}.toml")
        assert (config.method, config.data.set, config.train.k) == ("ntk-baffle", data, k)
        assert config.model.name == ("lenet5-wide" if model == "lenet5" else "resnet20")
        assert config.prune.iterations == (50 if model == "lenet5" else 20)
        assert config.prune.density == (0.1 if data == "cifar10" else 0.2)
        assert config.train.momentum == (0.9 if data == "cifar10" else 0.0)
        assert config.train.lr == (0.1 if (data, model) == ("cifar100", "resnet20") else 0.01)
        assert (config.train.weight_decay, config.train.lr_decay, config.rounds) == (1e-3, 0.998, 3000)
        assert (config.data.beta, config.data.devices, config.data.per_round) == (0.1, 100, 10)
        assert (config.model.activation, config.prune.rescale, config.train.spread) == ("relu", False, 1)
        assert model == "lenet5" or config.model.norm == "batch"
    for name in ("pruning-cifar10-lenet5", "pruning-cifar100-resnet20"):
        config = load(EXPERIMENTS / "paper" / f"{name}.toml")
        assert (config.method, config.effective_density, config.train.epochs) == ("ntk-fedavg", 0.2, 5)


def test_a_method_s_own_table_is_known_to_a_process_that_has_loaded_nothing_else():
    code = "from foreseed.config import load; print(load('lotteryfl').lotteryfl.share)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0.2\n", "")


def test_spreading_costs_no_more_forward_passes():
    plain, spread = (load(EXPERIMENTS / f"cifar10-lenet5{end}.toml") for end in ("", "-spread"))
    assert spread.train.k / spread.train.spread == plain.train.k / plain.train.spread
    assert (spread.train.k, spread.train.spread, spread.train.lr, spread.engine) == (500, 10, 0.02, "exact")


def test_a_shipped_experiment_is_found_by_its_name_and_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()  # a folder is no experiment
    assert load("demo", ["rounds=7"]) == load(EXPERIMENTS / "demo.toml", ["rounds=7"])
    assert load("paper/cifar10-lenet5-k100") == load(EXPERIMENTS / "paper" / "cifar10-lenet5-k100.toml")
    (tmp_path / "demo").rmdir()
    (tmp_path / "demo").write_text("rounds = 3")
    assert load("demo").rounds == 3


def test_an_unknown_experiment_lists_those_that_there_are():
    said = refusal("demoo")
    assert said.startswith("demoo: neither a file nor an experiment that comes with foreseed, which are ")
    assert all(f"{path.relative_to(EXPERIMENTS).with_suffix('')}" in said for path in FILES)
    assert said.endswith("; did you mean demo?")
