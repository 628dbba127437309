"""`foreseed doctor`: what this machine has, and what is missing."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from foreseed.bench.machine import compilers, describe_machine, memory_bytes, packages


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show versions, the C engine and its instruction set, compilers and memory.

    Example: foreseed doctor --json
    """
    found: dict[str, Any] = {
        "machine": describe_machine(),
        "packages": packages(),
        "compilers": compilers(),
        "memory_bytes": memory_bytes(),
    }
    if as_json:
        print(json.dumps(found))
        return
    console = Console()
    console.print(_table(found), soft_wrap=True)
    if found["machine"]["instruction_set"] is None:
        console.print(
            "The C engine is not built: install a C compiler, then reinstall foreseed (the reference is slow)."
        )


def _engine(used: str | None) -> str:
    if used is None:
        return "not built: the NumPy reference serves, slowly"
    from foreseed.engine.native import isas

    others = ", ".join(name for name in isas() if name != used)
    return f"built, runs {used}" + (f" (FORESEED_ISA chooses another: {others})" if others else "")


def _table(found: dict[str, Any]) -> Table:
    machine = found["machine"]
    table = Table("what", "found", show_header=False)
    table.add_row("foreseed", machine["foreseed"])
    table.add_row("C engine", _engine(machine["instruction_set"]))
    table.add_row("python", machine["python"])
    table.add_row("machine", f"{machine['processor']}, {machine['cores']} cores, {machine['system']}")
    table.add_row("memory", ", ".join(f"{n / 1e9:.1f} GB {name}" for name, n in found["memory_bytes"].items() if n))
    table.add_section()
    for name, version in found["packages"].items():
        table.add_row(name, version or "not installed")
    table.add_section()
    for name, path in found["compilers"].items():
        table.add_row(name, path or "not found")
    return table
