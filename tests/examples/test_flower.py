"""The Flower app, with a real SuperLink and real SuperNodes, in an environment of Flower's own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from foreseed.config import load
from foreseed.data import load as load_data
from foreseed.data import shard_name, write_shards
from foreseed.simulate import prepare, run_simulated

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples" / "flower"
PATIENCE = 300.0
"""Seconds until a test gives up; a round takes a few."""
SMALL = "rounds=3 eval_every=3 workers=1 data.devices=2 data.per_round=2 train.k=5 prune.pruner=random fleet.sample=all"


def _loaded(name: str) -> Any:
    """A module of the app's folder, which is no package."""
    spec = spec_from_file_location(name, APP / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


federation, bench = _loaded("federation"), _loaded("bench")


@pytest.fixture(scope="module")
def flower() -> Path:
    """The commands of Flower's environment, which is made if it is not there."""
    folder = Path(os.environ.get("FLOWER", Path(sys.prefix) / "flower"))
    done = subprocess.run(
        ["make", "flower", f"VENV={sys.prefix}", f"FLOWER={folder}", f"PYTHON={sys.executable}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin"


def test_the_app_is_the_simulators_to_the_bit_and_takes_what_nodes_do(flower: Path) -> None:
    """What `flower/cases.py` says of the app's parts, which can be loaded only where Flower is."""
    paths = [str(APP), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [
            flower / "python", "-m", "pytest", "-p", "no:cacheprovider", "-W", "default::DeprecationWarning",
            ROOT / "tests" / "examples" / "flower" / "cases.py",
        ],
        cwd=ROOT, env=os.environ | federation.ALONE | {"PYTHONPATH": os.pathsep.join(paths)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_a_run_that_was_stopped_goes_on_and_ends_as_the_simulator_does(
    flower: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.2")  # seconds; 1 otherwise
    config = load("demo", SMALL.split())
    task, population = prepare(config)
    write_shards(load_data(*config.data.source), population.partition, tmp_path / "shards")
    served, options = tmp_path / "served", {"experiment": "demo", "overrides": SMALL, "out": str(tmp_path / "served")}
    with federation.Federation(tmp_path / "federation", flower) as running:
        for number in range(config.data.devices):
            running.add_node({"shard": str(tmp_path / "shards" / shard_name(number)), "number": number})
        first = running.start(**options)
        wait_for(lambda: rounds_in(served) >= 1, running)
        # A node that hangs holds the run up, so that it cannot be over before Flower's command has begun.
        running.nodes[0].send_signal(signal.SIGSTOP)
        running.stop(first)
        running.nodes[0].send_signal(signal.SIGCONT)
        assert rounds_in(served) < config.rounds
        said = running.run(**options, resume=True)
        assert "foreseed: report: " in said, said + running.log()
    assert rounds_in(served) == config.rounds
    assert (served / "report.html").exists()
    run_simulated(config, tmp_path / "simulated", prepared=(task, population))
    assert (served / "model.fsp").read_bytes() == (tmp_path / "simulated" / "model.fsp").read_bytes()
    fleet = json.loads((served / "summary.json").read_text())["fleet"]
    assert fleet["devices"] == 2
    assert fleet["refused"] == {}


def test_the_benchmarks_proxy_carries_and_counts_every_byte_and_leaves_nothing_behind() -> None:
    threads = threading.active_count()
    with socket.create_server(("127.0.0.1", 0)) as server, bench.Proxy(server.getsockname()[1]) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port)) as near:
            far = server.accept()[0]
            near.sendall(b"u" * 1000)
            near.shutdown(socket.SHUT_WR)
            with far:
                assert far.makefile("rb").read() == b"u" * 1000
                far.sendall(b"d" * 70_000)
            assert near.makefile("rb").read() == b"d" * 70_000
        assert (proxy.up, proxy.down) == (1000, 70_000)
    assert threading.active_count() == threads
    assert all(one.fileno() == -1 for one in proxy._open)


def rounds_in(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_for(condition: Any, running: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, running.log()
        time.sleep(0.1)
