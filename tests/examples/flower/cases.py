"""Runs over Flower are the simulator's to the bit, and go on whatever a node does. `../test_flower.py` runs this file.

The ServerApp's devices and the ClientApp are real; a Grid in this process stands for Flower's own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from foreseed_flower import devices as flower
from foreseed_flower.devices import FlowerDevices
from foreseed_flower.records import JOIN, Ready, join_records, read_reply, welcome_for

from foreseed.config import Config
from foreseed.data import load, shard_name, write_shard, write_shards
from foreseed.engine import ForeseedError
from foreseed.fleet.devices import check
from foreseed.runs import Lease, Progress, Summary, run
from foreseed.simulate import run_simulated
from tests.examples.flower.loopback import Loopback
from tests.simulate.small import (
    WITH_BATCH_NORM,
    World,
    leave_out_the_slow,
    make_world,
    rows_of,
    small_config,
    write_bars,
)

FIRST = 100
"""The node of device 0."""


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_the_slow(monkeypatch.setattr)
    for name in ("_POLL", "_LOOK", "_RETRY"):
        monkeypatch.setattr(flower, name, 0.0)


class Bench:
    """A small world, its shards on disk, and a node for each."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder, self.grid, self.said = folder, Loopback(), list[str]()
        self.config = small_config(write_bars(folder / "bars.npz"), **({"fleet__sample": "all"} | changes))
        self.world: World = make_world(self.config)
        self.devices: FlowerDevices | None = None
        write_shards(load(self.config.data.set), self.world.population.partition, folder / "shards")
        for device in range(self.config.data.devices):
            self.grid.add(FIRST + device, shard=self.shard(device), number=device)

    def shard(self, device: int) -> str:
        return str(self.folder / "shards" / shard_name(device))

    def serve(self, resume: bool = False, watch: Callable[[Progress], None] | None = None) -> Summary:
        folder = self.folder / "served"
        lease = Lease(folder)

        def prepare(config: Config) -> tuple[Any, FlowerDevices]:
            check(config)
            self.devices = FlowerDevices(self.world.task, folder, self.grid.grid, lease, self.said.append)
            return self.world.task, self.devices

        return run(self.config, folder, prepare, resume=resume, watch=watch, lease=lease)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return rows_of(self.folder / "served")

    def is_the_simulators(self) -> bool:
        simulated = self.folder / "simulated"
        run_simulated(self.config, simulated, prepared=(self.world.task, self.world.population))
        return (simulated / "model.fsp").read_bytes() == (self.folder / "served" / "model.fsp").read_bytes()


def after(rounds: int, act: Callable[[], None]) -> Callable[[Progress], None]:
    """A watch that acts when so many rounds are done."""

    def watch(progress: Progress) -> None:
        if progress.stage == "train" and progress.done == rounds:
            act()

    return watch


def of_type(wanted: str, fault: str, times: int = 1000) -> Callable[[Message], str]:
    """A fault of the first messages of a type."""
    left = [times]

    def of(message: Message) -> str:
        if message.metadata.message_type != wanted or not left[0]:
            return ""
        left[0] -= 1
        return fault

    return of


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train__bits": 1, "train__k": 9},
        {"train__bits": 4},
        {"train__local_steps": 2, "train__optimiser": "adam"},
        {"model__name": WITH_BATCH_NORM},
        {"train__memory": True},
        {"train__seeds": "shared", "train__k": 4, "train__momentum": 0.9, "rounds": 12},
    ],
    ids=str,
)
def test_a_run_is_the_simulators_to_the_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    bench = Bench(tmp_path, **changes)
    bench.serve()
    assert bench.is_the_simulators()
    assert bench.said == []
    assert [kind for _, kind in bench.grid.types].count("query.join") == bench.config.data.devices


def test_devices_that_follow_by_the_log_are_sent_no_state(tmp_path: Path) -> None:
    """A node that answered before replays what it missed: from then on, a round's bytes are those of few numbers."""
    bench = Bench(tmp_path, train__seeds="shared", train__k=2, rounds=12)
    bench.serve()
    state = 4 * bench.world.task.program.n_live
    assert bench.rows[0]["bytes_down"] > 3 * state
    assert min(row["bytes_down"] for row in bench.rows) < state / 2


def test_a_resumed_run_is_the_simulators_with_nodes_that_know_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.serve(watch=after(2, stop))
    before = bench.grid.contexts
    bench.grid.contexts = {}
    for node, context in before.items():
        bench.grid.add(1000 + node, **context.node_config)
    bench.serve(resume=True)
    assert [row["round"] for row in bench.rows] == [1, 2, 3, 4, 5]
    assert bench.is_the_simulators()


def test_a_node_that_lost_its_state_is_given_it_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    joins = bench.config.data.devices
    bench.serve(watch=after(2, lambda: [bench.grid.forget(FIRST + device) for device in range(joins)] and None))
    assert bench.is_the_simulators()
    assert [kind for _, kind in bench.grid.types].count("query.join") > joins


def test_values_that_a_node_holds_wrongly_are_sent_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, data__per_round=6)

    def damage() -> None:
        for context in bench.grid.contexts.values():
            record = context.state["foreseed"]
            record["numbers"] = bytes(len(record["numbers"]))

    bench.serve(watch=after(2, damage))
    assert bench.is_the_simulators()


def test_a_round_goes_on_without_a_node_that_crashes(tmp_path: Path) -> None:
    bench = Bench(tmp_path, fleet__sample="present", fleet__gather=0.0)
    bench.grid.faults[FIRST] = of_type("train", "crash")
    bench.serve()
    assert all(0 not in row["participants"] for row in bench.rows)
    assert [len(row["participants"]) for row in bench.rows] == [3] * 5
    assert [line for line in bench.said if "the node crashed" in line] == [f"node {FIRST}: no reply (the node crashed)"]


def test_a_round_goes_on_without_nodes_that_are_silent(tmp_path: Path) -> None:
    bench = Bench(tmp_path, fleet__sample="present", fleet__deadline=0.2, fleet__min_replies=1, rounds=3)
    for device in range(1, 6):
        bench.grid.faults[FIRST + device] = of_type("train", "lost")
    bench.serve()
    assert [row["participants"] for row in bench.rows] == [[0]] * 3


def test_a_node_that_goes_offline_comes_back_under_its_number(tmp_path: Path) -> None:
    bench = Bench(tmp_path, fleet__sample="all", rounds=8)

    def restart() -> None:
        bench.grid.offline.add(FIRST)
        bench.grid.add(999, shard=bench.shard(0), number=0)

    bench.serve(watch=after(2, restart))
    assert bench.is_the_simulators()
    assert (999, "train") in bench.grid.types


def test_a_late_reply_counts_for_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, fleet__sample="present", fleet__deadline=3.0, fleet__min_replies=1, data__per_round=6)
    bench.grid.faults[FIRST] = of_type("train", "late", 1)
    bench.serve(watch=lambda progress: bench.grid.release_late())
    assert [row["participants"] for row in bench.rows[:1]] == [[1, 2, 3, 4, 5]]
    assert [row["refused"] for row in bench.rows[:3]] == [{}, {"late": 1}, {}]
    assert bench.said == ["round 1: 5 of 6 answers within 3 s"]


def test_a_reply_that_is_none_changes_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.grid.faults[FIRST] = of_type("train", "garbage", 1)
    bench.serve()
    assert bench.is_the_simulators()
    assert [line for line in bench.said if "cannot be read" in line]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"number": 0}, "no shard: start the SuperNode with --node-config"),
        ({"number": 0, "shard": "nowhere.bin"}, "nowhere.bin: cannot read the shard (No such file or directory)"),
        ({"number": 0, "shard": "OTHER"}, "no whole number of records"),
        ({"number": 0, "shard": "LABELS"}, "the shard belongs to another data set"),
        ({"number": "0", "shard": "OWN"}, "number '0' given"),
        ({"number": 1, "shard": "OWN"}, "device-1 is node 101 already; give every SuperNode a number of its own"),
        ({"number": 6, "shard": "OWN"}, "device 6 is not of this run; ask for a number from 0 to 5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_node_that_was_started_wrongly_is_told_in_a_line(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    bench = Bench(tmp_path, fleet__sample="present", fleet__gather=0.0, rounds=2)
    own = load(bench.config.data.set)
    write_shard(tmp_path / "OTHER", own.train_images[:3, :, :5, :5], own.train_labels[:3])
    write_shard(tmp_path / "LABELS", own.train_images[:3], own.train_labels[:3] + 100)
    files = {"OTHER": str(tmp_path / "OTHER"), "LABELS": str(tmp_path / "LABELS"), "OWN": bench.shard(0)}
    if "shard" in config:
        config = config | {"shard": files.get(config["shard"], config["shard"])}
    del bench.grid.contexts[FIRST]
    bench.grid.add(999, **config)
    bench.serve()
    said = [line for line in bench.said if line.startswith("node 999: ")]
    assert len(said) == 1
    assert reason in said[0]
    assert "\n" not in said[0]
    assert all(0 not in row["participants"] for row in bench.rows)


def test_a_program_that_is_not_what_the_server_says_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    program = bench.world.task.program.bytes
    welcome = welcome_for(bytes(8), program, 0, 0)
    for sent, reason in ((program[:-1], "another hash than the server says"), (program, None)):
        message = Message(join_records(welcome, sent), FIRST, JOIN)
        bench.grid.push_messages([message])
        (reply,) = bench.grid.pull_messages([message.metadata.message_id])
        said = read_reply(reply.content, None)
        assert isinstance(said, Ready) if reason is None else reason in said.reason


def test_what_a_node_gives_for_a_reason_is_one_short_line(tmp_path: Path) -> None:
    bench = Bench(tmp_path, fleet__sample="present", fleet__gather=0.0, rounds=2)
    del bench.grid.contexts[FIRST]
    bench.grid.add(999, shard="\x1b[2J\n" + 1000 * "x")
    bench.serve()
    (said,) = bench.said
    assert said.isprintable()
    assert len(said) < 400


def test_values_that_no_device_can_answer_at_end_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, eval_every=5)

    def blow_up() -> None:
        assert bench.devices is not None
        bench.devices._coordinator.state.values.fill(1e30)

    with pytest.raises(ForeseedError, match=r"round 2: .*not finite"):
        bench.serve(watch=after(1, blow_up))
    assert len([line for line in bench.said if "the values have grown too large" in line]) == 1


def test_a_client_app_loads_no_torch() -> None:
    heavy = "{'torch', 'pydantic', 'foreseed.coordinator'} & set(sys.modules)"
    code = f"import sys, foreseed_flower.client_app; print({heavy} or 'light')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "light"


def test_nodes_without_numbers_take_any_and_keep_them(tmp_path: Path) -> None:
    bench = Bench(tmp_path, fleet__sample="present", fleet__gather=0.0)
    for context in bench.grid.contexts.values():
        del context.node_config["number"]

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.serve(watch=after(2, stop))
    stored = (tmp_path / "served" / "checkpoint" / "devices.json").read_text()
    bench.serve(resume=True)
    assert (tmp_path / "served" / "checkpoint" / "devices.json").read_text() == stored
    assert {device for row in bench.rows for device in row["participants"]} <= set(range(6))
