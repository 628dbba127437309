"""What `make wheels` builds serves every Python and both processors; a bare machine needs little, and no compiler."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from signal import SIGHUP
from zipfile import ZipFile

import pytest

from foreseed.engine import Engine, Samples, load
from foreseed.engine.program import Kind, Op, assemble
from tests.deployment import Machine, rounds_in
from tests.engine.toolchain import run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST = 11
"""The minor version of pyproject's requires-python."""
SHARD = bytes([1, 0, 50, 100, 200])

LOSS = """
import sys, warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from foreseed.engine import Engine, Samples, load
model = load(sys.argv[1])
loss, correct = Engine(model.program).loss(model.values, Samples.records(bytes.fromhex(sys.argv[2]), 4))
print(Engine.__name__, *(warning.category.__name__ for warning in said), loss)
"""

VECTORS = """
import sys
from types import SimpleNamespace
from foreseed.engine import native
sys.path.append(sys.argv[1])
from tests.engine import test_vectors
checks = [check for name, check in vars(test_vectors).items() if name.startswith("test_")]
checks = [check for check in checks if check.__code__.co_argcount]  # those that take a backend
for check in checks:
    check(SimpleNamespace(functions=native))
print(sys.version_info[1], *(check.__name__ for check in checks))
"""

SOURCES = """
from pathlib import Path
import foreseed
package = Path(foreseed.__file__).parent
print(*(path.name for folder in ("csrc", "trained/firmware") for path in (package / folder).iterdir()))
"""
CHECKED = {"test_directions", "test_gradient_estimates", "test_sgd_steps", "test_adam_steps"}

# Whether an interpreter starts (a version manager's stand-in may not), is the one that its name says, and can build.
COMPLETE = """
import os, sys, sysconfig, venv
sys.exit(sys.version_info[1] != int(sys.argv[1]) or not os.path.exists(sysconfig.get_path("include") + "/Python.h"))
"""


def supported_pythons() -> dict[int, Path]:
    """This interpreter, and one of every other supported version: on PATH, or one of pyenv's; by minor version."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    folders = [*map(Path, os.get_exec_path()), *sorted(pyenv.glob("versions/*/bin"))]
    found = {sys.version_info[1]: Path(sys.executable)}
    for minor, path in ((minor, path) for folder in folders for minor, path in _pythons(folder)):
        if minor >= OLDEST and minor not in found and _is_complete(path, minor):
            found[minor] = path
    return dict(sorted(found.items()))


def _pythons(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in sorted(folder.glob("python3.*")):
        if name := re.fullmatch(r"python3\.(\d+)", path.name):
            yield int(name[1]), path


def _is_complete(python: Path, minor: int) -> bool:
    try:
        done = subprocess.run([python, "-I", "-c", COMPLETE, str(minor)], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


PYTHONS = supported_pythons()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file written here, to be read by the installations."""
    path = tmp_path_factory.mktemp("model") / "model.fsp"
    ops = [Op(Kind.CONV, 0, channels=3, groups=1, window=(2, 2, 1, 1, 0, 0))]
    program = assemble((1, 2, 2), 3, [0.01], [0.0], ops, [[0, 3, 5, 10]])
    program.save(path, array("f", [0.5, -0.25, 1.0, 2.0]))
    return path


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels, by processor."""
    folder = tmp_path_factory.mktemp("wheels")
    done = subprocess.run(
        ["make", "wheels", f"DIST={folder}", f"PYTHON={sys.executable}"],
        capture_output=True, text=True, check=False, cwd=ROOT, env=without_pythonpath(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert len(list(folder.glob("*.tar.gz"))) == 1
    return {path.stem.partition("manylinux_2_17_")[2]: path for path in folder.glob("*.whl")}


def without_pythonpath() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


class Installation:
    """A virtual environment of its own, and a copy of the sources."""

    def __init__(self, folder: Path, python: str | Path = sys.executable) -> None:
        self.source = folder / "source"
        # What was built here must not be taken for what is built there.
        built = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
        for name in ("src", "csrc"):
            shutil.copytree(ROOT / name, self.source / name, ignore=built)
        for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, self.source)
        subprocess.run([python, "-I", "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.bin = folder / "venv" / "bin"

    def pip(self, *arguments: str, compiler: bool = True) -> str:
        """What pip says; without a compiler, none is to be found."""
        constraints = ["-c", str(CONSTRAINTS)] if CONSTRAINTS.exists() else []
        environment = without_pythonpath()
        if not compiler:
            environment |= {"PATH": str(self.bin), "CC": "/nonexistent"}
        pip = [sys.executable, "-m", "pip", "--python", self.bin / "python", "--disable-pip-version-check"]
        done = subprocess.run(
            [*pip, *arguments, *(constraints if arguments[0] == "install" else [])],
            capture_output=True, text=True, check=False, env=environment, cwd=self.source,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    def loss(self, model: Path) -> tuple[list[str], float]:
        """The engine's name with the warnings of its import, and the loss that it computes."""
        *names, loss = self.run("python", "-I", "-c", LOSS, str(model), SHARD.hex()).split()
        return names, float(loss)

    def run(self, program: str, *arguments: str) -> str:
        """What an installed program prints, run away from the sources."""
        done = subprocess.run(
            [self.bin / program, *arguments], capture_output=True, text=True, check=False, cwd=self.bin
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout


def expected_loss(model: Path) -> float:
    found = load(model)
    return Engine(found.program).loss(found.values, Samples.records(SHARD, 4))[0]


def test_there_is_one_wheel_a_processor_for_every_python_and_any_linux(wheels: dict[str, Path]) -> None:
    assert wheels.keys() == {"x86_64", "aarch64"}
    for processor, wheel in wheels.items():
        tags = wheel.stem.split("-")[2:]
        assert tags[:2] == [f"cp3{OLDEST}", "abi3"]
        assert f"manylinux_2_17_{processor}" in tags[2].split(".")


@pytest.mark.parametrize("minor", PYTHONS)
def test_plain_install_brings_the_c_engine_without_numpy_or_torch(
    minor: int, model: Path, wheels: dict[str, Path], tmp_path: Path
) -> None:
    installation = Installation(tmp_path, PYTHONS[minor])
    installation.pip("install", str(wheels[platform.machine()]))
    names = {line.split()[0].lower() for line in installation.pip("list").splitlines()}
    assert {"foreseed", "cffi"} <= names
    assert not names & {"numpy", "torch"}
    assert installation.loss(model) == (["NativeEngine"], expected_loss(model))
    version, *checked = installation.run("python", "-I", "-c", VECTORS, str(ROOT)).split()
    assert int(version) == minor
    assert set(checked) >= CHECKED
    assert "--broker" in installation.run("foreseed-device", "--help")
    # What `foreseed export --to c` gives to firmware.
    shipped = installation.run("python", "-I", "-c", SOURCES).split()
    sources = [path.name for path in (ROOT / "csrc").iterdir() if path.suffix in (".c", ".h", ".inl")]
    assert sorted(shipped) == sorted([*sources, "Makefile", "main.c"])
    for arguments in (["run", "demo"], ["--help"], []):
        done = subprocess.run([installation.bin / "foreseed", *arguments], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("foreseed: this is the device side alone (typer is not installed); ")
        assert "pip install 'foreseed[server]'" in done.stderr
        assert done.stderr.count("\n") == 1


def test_what_is_shipped_is_in_every_wheel(wheels: dict[str, Path]) -> None:
    package = ROOT / "src" / "foreseed"
    shipped = {
        path.relative_to(package.parent).as_posix()
        for folder in ("experiments", "deploy", "start")
        for path in (package / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len(shipped) > 25
    for wheel in wheels.values():
        assert shipped <= set(ZipFile(wheel).namelist())


def test_the_other_processor_s_wheel_gives_the_same_bits(wheels: dict[str, Path], tmp_path: Path) -> None:
    """On Debian's own Python for it, in an emulator."""
    root, site = tmp_path / "root", tmp_path / "site"
    python, minor = foreign_python(tmp_path, root)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([
        *pip, "install", "--quiet", "--target", site, "--no-deps", "--only-binary", ":all:", "-c", CONSTRAINTS,
        "--platform", "manylinux_2_17_aarch64", "--python-version", f"3.{minor}", "cffi", wheels["aarch64"],
    ], env=without_pythonpath())  # fmt: skip
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n{VECTORS}"
    command = ["qemu-aarch64", "-L", root, python, "-I", "-S", "-c", code, ROOT]
    version, *checked = run(command, cwd=tmp_path).split()
    assert int(version) == minor
    assert set(checked) >= CHECKED


def foreign_python(folder: Path, root: Path) -> tuple[Path, int]:
    """Debian's Python for aarch64 and its minor version, unpacked into `root`; nothing of this machine is changed."""
    for place in ("lists/partial", "cache/archives/partial"):
        (folder / place).mkdir(parents=True)
    settings = {
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "Dir::State::Lists": folder / "lists",
        "Dir::Cache": folder / "cache", "Dir::State::status": "/dev/null", "Debug::NoLocking": "1",
        "APT::Sandbox::User": "root",
    }  # fmt: skip
    apt = ["apt-get", "-qq", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
    run([*apt, "update"])
    run([*apt, "install", "--download-only", "-y", "--no-install-recommends", "python3-minimal", "libpython3-stdlib"])
    for package in (folder / "cache" / "archives").glob("*.deb"):
        run(["dpkg-deb", "-x", package, root])
    (python,) = (path for path in (root / "usr" / "bin").iterdir() if re.fullmatch(r"python3\.\d+", path.name))
    return python, int(python.name.partition(".")[2])


def test_every_command_of_the_deployment_page_runs_with_what_the_package_brings(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    # One board is a small fleet, and a mask need not be good.
    quick = "fleet.gather=0 prune.iterations=1 prune.redraws=1 prune.batch=8"
    with Machine(tmp_path, wheels[platform.machine()].parent, "deploy.md") as machine:
        rows = partial(rounds_in, machine.home / "runs" / "ntk-baffle")

        # The server and the broker's keys.
        assert "built, runs" in machine.run(machine.take("python3 -m venv ~/foreseed", 4))
        machine.run(machine.take("foreseed fleet keys"))
        machine.run(machine.take("foreseed data shard"))
        assert "board-7 is 12" in machine.run(machine.take("foreseed fleet enrol", 2))

        # The board, with the files that the page has copied there.
        assert machine.run(machine.take("sudo apt install python3-venv", 4)).endswith("\nNativeEngine\n")
        keys = machine.home / "keys"
        copied = ("ca.crt", "device-0.crt", "device-0.key", "device-0.conf", "foreseed-device.service")
        for file in (*(keys / name for name in copied), machine.home / "shards" / "device-00000.bin"):
            shutil.copy(file, machine.board)
        machine.run(machine.take("sudo useradd", 7), machine.board)

        # A trial by hand.
        assert machine.run(machine.take("sudo apt install mosquitto")).strip() == "called apt install mosquitto"
        trial = machine.start_broker(keys / "mosquitto.conf", "trial", machine.take("/usr/sbin/mosquitto"))
        server = machine.start(f"exec {machine.take('foreseed serve')} {quick}", "server")
        device = machine.start(machine.take("cd /tmp", 3), "device", machine.board)
        device.wait_until(lambda: "ready as device 0" in device.said)
        server.wait_until(lambda: rows() > 0)
        machine.run(machine.take("sudo apt install mosquitto-clients"))
        seen = machine.start(f"exec {machine.take('mosquitto_sub')}", "seen")
        seen.wait_until(lambda: re.search(r"/device-0/here \w*f5\n", seen.said))
        for process in (seen, device, server, trial):
            process.stop()
        held = rows()

        # The broker and the device as services, the server by its password.
        machine.run(machine.take("sudo install -d -o mosquitto", 4))
        service = machine.folder / "etc" / "mosquitto" / "conf.d" / "foreseed.conf"
        broker = machine.start_broker(service, "broker", f"exec /usr/sbin/mosquitto -c {service}")
        server = machine.start(f"exec {machine.take('foreseed serve')} {quick} --resume", "server")
        machine.run(machine.take("sudo install -m 0644", 5), machine.board)
        device = machine.start_unit("device")
        server.wait_until(lambda: rows() > held)

        # A node of a cluster.
        machine.run(machine.take("foreseed fleet keys cluster"))
        machine.run(machine.take("sudo apt install nats-server", 5))
        node = machine.folder / "etc" / "nats" / "foreseed" / "a.example.org.conf"
        node.write_text(machine.here(node.read_text()))
        run(["/usr/sbin/nats-server", "-t", "-c", str(machine.folder / "etc" / "nats-server.conf")])

        # Who is there, and what one could go back to.
        assert "device-0" in machine.run(machine.take("foreseed fleet status"))
        assert "round" in machine.run(machine.take("foreseed runs"))

        # The board is shut out.
        acl = machine.folder / "etc" / "mosquitto" / "foreseed" / "acl"
        acl.write_text(f"user device-0\ntopic deny #\n\n{acl.read_text()}")
        assert machine.lets_in("device-0")
        machine.run(machine.take("sudo mosquitto_passwd", 2).replace("NAME", "device-0"))
        broker.signal(SIGHUP)  # as a reload does
        broker.wait_until(lambda: not machine.lets_in("device-0"))

        assert machine.left == []


def test_install_without_a_compiler_warns_once_and_uses_numpy(model: Path, tmp_path: Path) -> None:
    installation = Installation(tmp_path)
    installation.pip("install", "numpy")
    for how in (["."], ["--editable", "."]):
        installation.pip("install", *how, compiler=False)
        names, loss = installation.loss(model)
        assert names == ["ReferenceEngine", "RuntimeWarning"]
        assert loss == pytest.approx(expected_loss(model), rel=1e-6)


def test_the_package_names_the_pythons_that_were_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">=3.{OLDEST}"
    named = {int(found[1]) for line in project["classifiers"] if (found := re.search(r"Python :: 3\.(\d+)$", line))}
    assert min(named) == OLDEST
    assert set(PYTHONS) <= named
