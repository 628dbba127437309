"""`foreseed serve` and `testbed`: parse, call, print."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foreseed.cli.experiment import At, Json, Out, Quiet, Resume, Track, Words, ask, file_and_overrides, finish, tracked

_EMBEDDED = "embedded"


def serve(
    words: Words = None,
    broker: Annotated[
        str,
        typer.Option(
            help="mqtts://host[:8883] (several, for a cluster: mqtts://a,b,c), mqtt://localhost[:1883], or "
            "embedded[:port] for a trial."
        ),
    ] = _EMBEDDED,
    ca: Annotated[str, typer.Option(help="File of the authority that signed the broker's certificate.")] = "",
    cert: Annotated[str, typer.Option(help="File of the server's own certificate.")] = "",
    key: Annotated[str, typer.Option(help="File of its key.")] = "",
    user: Annotated[str, typer.Option(help="User name at the broker, instead of a certificate.")] = "",
    password_file: Annotated[str, typer.Option(help="File with the password.")] = "",
    insecure: Annotated[bool, typer.Option(help="Allow plain text to a broker on another machine.")] = False,
    enrolled: Annotated[
        Path | None, typer.Option(help="Who takes part, under which number (see foreseed fleet enrol); nobody else.")
    ] = None,
    out: Out = None,
    resume: Resume = False,
    standby: Annotated[
        bool, typer.Option(help="With --resume: while another server lives, wait, to take over when it is lost.")
    ] = False,
    at: At = None,
    track: Track = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run one experiment on a fleet of real devices, each of them a foreseed-device.

    Example: foreseed serve demo --broker mqtts://broker.lan --ca ca.crt --cert server.crt
    --key server.key
    """
    from foreseed.cli.devices import DeviceTable
    from foreseed.fleet.devices import check
    from foreseed.fleet.enrolment import agreed, read
    from foreseed.fleet.experiment import run_served
    from foreseed.runs import Lease
    from foreseed.transport.link import broker as broker_at

    asked = ask(tracked(words, track), out, resume, at)
    config, folder = asked.config, asked.folder
    check(config)
    names = None if enrolled is None else agreed(read(enrolled), {}, config.data.devices)
    console = Console(stderr=True, markup=False)  # with markup, [fe80::1] would vanish
    secrets = {"ca": ca, "cert": cert, "key": key, "user": user, "password_file": password_file}
    # The embedded broker is there until the report is: every device has time to hear that the run is over.
    with _embedded(broker) as url:
        reached = broker_at(url, **secrets, insecure=insecure)
        with DeviceTable(console, config, quiet or as_json) as table:
            summary = run_served(
                config, folder, reached, table.say, **asked.how, watch=table.progress, look=table.devices, names=names,
                lease=Lease(folder, standby=standby, say=table.say),
            )  # fmt: skip
        finish([folder], folder, as_json, summary.model_dump())


def run_testbed(
    words: Words = None,
    out: Out = None,
    limit: Annotated[
        int, typer.Option(min=16, help="Megabytes of address space (RLIMIT_AS) that a device process may have.")
    ] = 64,
    embedded: Annotated[bool, typer.Option(help="Use the built-in broker even if there is a mosquitto.")] = False,
    baffle: Annotated[bool, typer.Option(help="Run plain BAFFLE beside it.")] = True,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The paper's test-bed on this machine: a broker, a server and ten device processes with little memory.

    Example: foreseed testbed rounds=50 --out runs/testbed
    """
    from foreseed.cli.devices import DeviceTable
    from foreseed.fleet.testbed import Testbed, arms

    file, overrides = file_and_overrides(words or [])
    folder = out or Path("runs") / "testbed"
    summaries, folders = [], []
    with Testbed(folder, embedded=embedded, limit=limit * 10**6) as bed:
        for arm in arms(file, overrides, baffle):
            folders.append(folder / arm.run_name)
            with DeviceTable(Console(stderr=True, markup=False), arm, quiet or as_json) as table:
                summaries.append(bed.run(arm, table).model_dump())
    finish(folders, folder, as_json, summaries)


@contextmanager
def _embedded(broker: str) -> Iterator[str]:
    """The broker's URL; an embedded one runs as long as it is used."""
    name, _, port = broker.partition(":")
    if name != _EMBEDDED:
        yield broker
        return
    if port and not (port.isdecimal() and int(port) < 65536):
        raise typer.BadParameter(f"--broker {broker}: expected embedded or embedded:PORT")
    from foreseed.fleet.embedded import EmbeddedBroker

    with EmbeddedBroker(int(port or 1883)) as embedded:
        yield embedded.url
