from hypothesis import given, settings
from hypothesis import strategies as st

from foreseed.config import Config, differences, fingerprint, load
from tests.config.strategies import SETTINGS


@settings(deadline=None)
@given(st.sampled_from(sorted(SETTINGS)), st.data())
def test_one_changed_key_is_the_one_that_is_named(key, data):
    # Where one key bounds another, the base leaves room for every value.
    room = {"data.devices": 2**32 - 1, "data.per_round": 1, "train.k": 2**32 - 1}
    remembers = {"train.memory": True}
    needs = {"train.robust": {"train.seeds": "shared"}, "train.nesterov": remembers, "train.rate": remembers}
    base = Config().with_(room | needs.get(key, {}))
    changed = base.with_({key: data.draw(SETTINGS[key])})
    of_no_effect = key in ("workers", "name") or (key.startswith(("fleet.", "track.")) and key != "fleet.max_share")
    expected = [] if changed == base or of_no_effect else [key]
    assert differences(base, changed) == expected
    assert (fingerprint(base) == fingerprint(changed)) == (not expected)


def test_workers_and_name_do_not_make_another_run():
    a, b = load(None, ["workers=1", "name=a"]), load(None, ["workers=8", "name=b"])
    assert a != b
    assert fingerprint(a) == fingerprint(b)
    assert differences(a, b) == []


def test_differences_are_named_in_the_order_of_the_file():
    assert differences(Config(), load(None, ["train.k=9", "seed=1", "data.beta=1"])) == ["seed", "data.beta", "train.k"]


def test_an_integer_and_the_equal_number_are_the_same_run():
    assert fingerprint(load(None, ["train.lr=1"])) == fingerprint(load(None, ["train.lr=1.0"]))


def test_a_zero_of_another_sign_is_another_run():
    assert differences(Config(), Config().with_({"train.clip": -0.0})) == ["train.clip"]
