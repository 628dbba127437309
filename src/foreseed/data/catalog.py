"""The data sets that foreseed knows by name: where they come from and what their files must be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from foreseed.data.errors import DataError


@dataclass(frozen=True)
class DataFile:
    """One file of a data set, unpacked."""

    name: str
    size: int
    sha256: str | None = None
    """None where nobody published it; then the package's MD5 is the proof."""


@dataclass(frozen=True)
class Package:
    """A file as its publisher offers it, and the members inside."""

    name: str
    md5: str
    addresses: tuple[str, ...]
    members: tuple[DataFile, ...]


@dataclass(frozen=True)
class Entry:
    """A data set that has a name."""

    name: str
    summary: str
    layout: Literal["built-in", "idx", "cifar10", "cifar100"]
    classes: tuple[str, ...]
    packages: tuple[Package, ...] = ()
    system_folder: Path | None = None
    """Where an operating system's own package puts the files."""

    @property
    def members(self) -> tuple[DataFile, ...]:
        """Every file of the set."""
        return tuple(member for package in self.packages for member in package.members)


def catalogue(entries: Iterable[Entry]) -> MappingProxyType[str, Entry]:
    """Entries by name; a name that is given twice is refused."""
    table: dict[str, Entry] = {}
    for entry in entries:
        if entry.name in table:
            raise DataError(f"data set {entry.name!r} is entered twice; give one of the two another name")
        table[entry.name] = entry
    return MappingProxyType(table)


def _idx_packages(hosts: tuple[str, ...], sums: dict[str, tuple[str, int, str]]) -> tuple[Package, ...]:
    """The four files of a set of the MNIST family; `sums` gives MD5 (gz), size and SHA-256 (unpacked)."""
    return tuple(
        Package(f"{name}.gz", md5, tuple(f"{host}{name}.gz" for host in hosts), (DataFile(name, size, sha256),))
        for name, (md5, size, sha256) in sums.items()
    )


_DIGIT_NAMES = tuple("0123456789")

_MNIST = _idx_packages(
    ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    {
        "train-images-idx3-ubyte": (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873", 47_040_016,
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        "train-labels-idx1-ubyte": (
            "d53e105ee54ea40749a09fcbcd1e9432", 60_008,
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        "t10k-images-idx3-ubyte": (
            "9fb629c4189551a2d022fa330f9573f3", 7_840_016,
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        "t10k-labels-idx1-ubyte": (
            "ec29112dd5afa0611ce80d1b7f02629c", 10_008,
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    },
)  # fmt: skip

_FASHION = _idx_packages(
    ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    {
        "train-images-idx3-ubyte": (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d", 47_040_016,
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        "train-labels-idx1-ubyte": (
            "25c81989df183df01b3e8a0aad5dffbe", 60_008,
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
        "t10k-images-idx3-ubyte": (
            "bef4ecab320f06d8554ea6380940ec79", 7_840_016,
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        "t10k-labels-idx1-ubyte": (
            "bb300cfdad3c16e7a12a480ee83cd310", 10_008,
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    },
)  # fmt: skip

_CIFAR10 = Package(
    "cifar-10-binary.tar.gz",
    "c32a1d4ab5d03f1284b67883e8d87530",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
    (
        DataFile("data_batch_1.bin", 30_730_000, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        DataFile("data_batch_2.bin", 30_730_000, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        DataFile("data_batch_3.bin", 30_730_000, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        DataFile("data_batch_4.bin", 30_730_000, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        DataFile("data_batch_5.bin", 30_730_000, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
        DataFile("test_batch.bin", 30_730_000, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
    ),
)

_CIFAR100 = Package(
    "cifar-100-binary.tar.gz",
    "03b5dce01913d631647c71ecec9e9cb8",
    ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
    (DataFile("train.bin", 153_700_000), DataFile("test.bin", 30_740_000)),
)

_CIFAR100_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
    """

SETS = catalogue(
    (
        Entry("digits", "1,797 handwritten digits, 3x32x32; built in, needs no download", "built-in", _DIGIT_NAMES),
        Entry("mnist", "70,000 handwritten digits, 1x32x32", "idx", _DIGIT_NAMES, _MNIST),
        Entry(
            "fashion-mnist",
            "70,000 photographs of clothing, 1x32x32; also found where Debian's dataset-fashion-mnist put it",
            "idx",
            ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
            _FASHION,
            Path("/usr/share/datasets/fashion-mnist"),
        ),
        Entry(
            "cifar10",
            "60,000 small photographs in 10 classes, 3x32x32",
            "cifar10",
            ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            (_CIFAR10,),
        ),
        Entry(
            "cifar100",
            "60,000 small photographs in 100 (fine) classes, 3x32x32",
            "cifar100",
            tuple(_CIFAR100_NAMES.split()),
            (_CIFAR100,),
        ),
    )
)
"""Every data set that has a name, by that name; the first is the default."""
