"""`foreseed fleet`: what a real fleet needs before it runs, and who is there when it does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import typer

from foreseed.engine.errors import ForeseedError

fleet_app = typer.Typer(no_args_is_help=True, help="A real fleet over MQTT: its keys, who takes part, who is there.")

_MOST = 100_000


@fleet_app.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of keys; one that exists is added to.")],
    device: Annotated[list[str] | None, typer.Option(help="A device's name; repeat it for more.")] = None,
    count: Annotated[int | None, typer.Option(help="Make N devices: device-0 to device-(N-1).", metavar="N")] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address of the broker; repeat it for more. This machine alone if not given."),
    ] = None,
    days: Annotated[int, typer.Option(help="How long certificates are valid.")] = 365,
    broker: Annotated[
        Literal["mosquitto", "nats"],
        typer.Option("--for", help="The broker; nats with three hosts or more is a cluster, a node on each."),
    ] = "mosquitto",
) -> None:
    """Make a CA, a certificate and a password for the server and every device, and the broker's configuration.

    Example: foreseed fleet keys keys --count 10 --host broker.example.org
    """
    from foreseed.fleet.keys import make_keys

    names = _names(device, count)
    done = make_keys(folder, names, host, days, broker == "nats")
    print(f"{folder}: the broker's certificate is for {', '.join(done.hosts)}")
    for what, which in (("made", done.made), ("left alone, they have their keys", done.kept)):
        if which:
            print(f"{what}: {_listed(which)}")
    _print_next(folder, names[0] if names else "NAME", done.hosts, broker)


@fleet_app.command()
def enrol(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The enrolment file; one that exists is added to.")],
    device: Annotated[list[str] | None, typer.Option(help="A device's name; repeat it for more.")] = None,
    count: Annotated[int | None, typer.Option(help="Enrol device-0 to device-(N-1).", metavar="N")] = None,
    number: Annotated[
        int | None, typer.Option(min=0, help="Its number in the run; the lowest free one if not given.")
    ] = None,
) -> None:
    """Decide who takes part, under which number: serve FILE with --enrolled, and nobody else joins.

    Example: foreseed fleet enrol devices.toml --device board-7 --number 3
    """
    from foreseed.fleet.enrolment import enrol

    names = _names(device, count)
    if not names:
        raise ForeseedError("nobody to enrol; give --device NAME or --count N")
    numbers = enrol(file, names, number)
    print(f"{file}: {len(numbers)} devices; {_listed(tuple(f'{name} is {numbers[name]}' for name in names))}")
    print(f"next: foreseed serve EXPERIMENT.toml --enrolled {quote(str(file))}")


def _names(device: list[str] | None, count: int | None) -> list[str]:
    if count is not None and not 1 <= count <= _MOST:
        raise ForeseedError(f"--count {count}: expected 1 to {_MOST} devices")
    return [*(device or []), *(f"device-{number}" for number in range(count or 0))]


@fleet_app.command()
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that is, or was, served.")],
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, on standard output.")] = False,
) -> None:
    """Who is enrolled, present, awaited, resting or refused, and why, as the server wrote it some seconds ago.

    Example: foreseed fleet status runs/ntk-baffle --watch
    """
    from foreseed.cli.status import show, shown
    from foreseed.runs.status import read_status

    if as_json:
        print(read_status(run).model_dump_json(indent=1))
    elif watch:
        show(run)
    else:
        shown(run)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names if len(names) <= 8 else (*names[:3], f"... {len(names) - 4} more ...", names[-1]))


def _print_next(folder: Path, name: str, hosts: Sequence[str], kind: str) -> None:
    from foreseed.fleet.nats import INSTALLED, is_cluster

    nodes = hosts if kind == "nats" and is_cluster(hosts) else hosts[:1]
    broker = "mqtts://" + ",".join(f"[{host}]" if ":" in host else host for host in nodes)

    def as_name(who: str) -> str:
        files = {"ca": "ca.crt", "cert": f"{who}.crt", "key": f"{who}.key"}
        return " ".join(f"--{option} {quote(str(folder / file))}" for option, file in files.items())

    print("next (a broker that is running takes up what is new when it gets SIGHUP):")
    if kind == "nats":
        print(f"  copy {quote(str(folder / 'nats'))} to {INSTALLED} on {' and '.join(nodes)}; start nats-server there")
    else:
        # Its full path: Debian puts it where only root's PATH leads.
        print(f"  /usr/sbin/mosquitto -c {quote(str(folder / 'mosquitto.conf'))}")
    print(f"  foreseed serve EXPERIMENT.toml --broker {broker} {as_name('server')}")
    print(f"  foreseed-device --broker {broker} --name {name} --shard FILE {as_name(name)}")
