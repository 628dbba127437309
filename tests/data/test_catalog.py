import re

import pytest

from foreseed.data import SETS, DataError
from foreseed.data.catalog import Entry, catalogue


def test_a_name_given_twice_is_refused():
    entry = Entry("flowers", "flowers", "built-in", ("rose",))
    with pytest.raises(DataError, match="'flowers' is entered twice"):
        catalogue([entry, entry])


def test_the_default_set_is_first_and_needs_no_download():
    first = next(iter(SETS.values()))
    assert first.name == "digits"
    assert first.packages == ()


@pytest.mark.parametrize("entry", SETS.values(), ids=str)
def test_entries_are_complete(entry):
    assert len(set(entry.classes)) == len(entry.classes) == (100 if entry.name == "cifar100" else 10)
    assert len({member.name for member in entry.members}) == len(entry.members)
    for package in entry.packages:
        assert re.fullmatch("[0-9a-f]{32}", package.md5)
        assert package.addresses
        assert all(address.endswith("/" + package.name) for address in package.addresses)
    for member in entry.members:
        assert member.sha256 is None or re.fullmatch("[0-9a-f]{64}", member.sha256)


@pytest.mark.parametrize(("name", "record"), [("cifar10", 3073), ("cifar100", 3074)])
def test_cifar_files_hold_sixty_thousand_records(name, record):
    assert sum(member.size for member in SETS[name].members) == 60_000 * record
    assert all(member.size % record == 0 for member in SETS[name].members)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files_hold_seventy_thousand_images_and_labels(name):
    sizes = [member.size for member in SETS[name].members]
    assert sizes == [16 + 60_000 * 784, 8 + 60_000, 16 + 10_000 * 784, 8 + 10_000]
