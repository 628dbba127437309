"""`foreseed run`, `compare`, `report` and `prune`: parse, call, print."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from foreseed.config import Config, ConfigError, arms, load
from foreseed.engine import Program

if TYPE_CHECKING:
    from foreseed.runs import Summary

# Heavy rooms (torch, matplotlib) are imported by the commands that need them: `--help` stays quick.

Words = Annotated[
    list[str] | None,
    typer.Argument(help="An experiment (a .toml file, or the name of a shipped one, such as demo), then key=value."),
]
Out = Annotated[Path | None, typer.Option(help="The run folder; runs/NAME if not given.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on standard output.")]
Track = Annotated[
    str, typer.Option(metavar="NAME[,NAME]", help="Tell trackers too: tensorboard, mlflow, wandb (as track.to=NAME).")
]
Resume = Annotated[
    bool, typer.Option(help="Go on with a run that was stopped or killed; overrides change what may change in it.")
]
At = Annotated[
    int | None,
    typer.Option(metavar="ROUND", min=1, help="With --resume: go back to this round (`foreseed runs RUN` lists them)."),
]
On = Annotated[
    str,
    typer.Option(
        metavar="ray[://HOST:PORT]",
        help="Compute on Ray: on this machine alone, or on the cluster that it is a node of.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and no words on the result.")]


@dataclass(frozen=True)
class Asked:
    """What a command line asks for: an experiment, where it runs, and how it goes on if it has begun."""

    config: Config
    folder: Path
    resume: bool = False
    at: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def how(self) -> dict[str, Any]:
        """As those take it that run experiments."""
        return {"resume": self.resume, "at": self.at, "changes": self.changes}


def run(
    words: Words = None,
    out: Out = None,
    resume: Resume = False,
    at: At = None,
    like: Annotated[
        Path | None, typer.Option(help="A served run's folder: ask the devices that answered there, round by round.")
    ] = None,
    track: Track = "",
    on: On = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run one experiment: prune, train, report.

    Example: foreseed run demo train.k=100 --out runs/k100

    One that went wrong: foreseed run --out runs/k100 --resume --at 40 train.lr=0.001
    """
    asked = ask(tracked(words, track), out, resume, at)
    summary = run_one(asked, quiet or as_json, like, described(asked, words or []), on)
    folder = asked.folder
    finish([folder], folder, as_json, summary, explained=not quiet)


def compare(
    words: Annotated[
        list[str] | None, typer.Argument(help="Experiment files, one an arm, then key=value overrides for all.")
    ] = None,
    methods: Annotated[str, typer.Option(help="Arms by method, such as ntk-baffle,baffle,fedavg.")] = "",
    pruners: Annotated[
        str, typer.Option(help="Arms by pruner, at the same density, such as ntk-rand,snip,random.")
    ] = "",
    seeds: Annotated[str, typer.Option(help="Seeds to repeat every arm with, such as 0,1,2.")] = "",
    out: Out = None,
    resume: Annotated[bool, typer.Option(help="Go on with a comparison that was stopped or killed.")] = False,
    track: Track = "",
    on: On = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run several arms on the same data, partition and initial weights, and report on all of them.

    Example: foreseed compare --methods ntk-baffle,baffle,fedavg demo --seeds 0,1,2

    Pruners: foreseed compare demo --pruners ntk-rand,synflow,snip,grasp,erk,random
    """
    runs = _arms(tracked(words, track), methods, pruners, seeds)
    kinds = dict.fromkeys(arm.prune.pruner if pruners else arm.method for arm in runs)
    folder = out or Path("runs") / "-vs-".join(kinds)
    folders = [folder / arm.run_name for arm in runs]
    if on:
        summaries = [summary.model_dump() for summary in whole_runs(runs, folders, on, quiet or as_json, resume)]
    else:
        summaries = [
            run_one(Asked(arm, place, resume and (place / "config.toml").exists()), quiet or as_json)
            for arm, place in zip(runs, folders, strict=True)
        ]
    finish(folders, folder, as_json, summaries, explained=not quiet)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; the first run's folder if not given.")] = None,
    as_json: Json = False,
) -> None:
    """Write report.html and its figures for one run or several.

    Example: foreseed report runs/ntk-baffle runs/baffle --out runs/both
    """
    finish(runs, out or runs[0], as_json, None)


def prune(
    words: Words = None,
    out: Annotated[Path, typer.Option(help="The mask file to write.")] = Path("mask.npz"),
    as_json: Json = False,
) -> None:
    """Choose which weights live, before any training, and write the mask.

    Example: foreseed prune demo prune.density=0.2 --out mask.npz
    """
    from foreseed.prune import save_mask
    from foreseed.simulate import prepare

    config = config_of(words or [])
    if out.exists():
        raise ConfigError(f"{out} exists; choose another --out")
    task, _ = prepare(config)
    if task.pruning is None:
        raise ConfigError(f"method {config.method} at density {config.effective_density} has nothing to prune")
    save_mask(out, task.pruning.mask)
    if as_json:
        print(json.dumps({"mask": str(out), "densities": task.pruning.densities, **_work(task.program)}))
        return
    console = Console()
    console.print(_densities(task.program))
    console.print(f"mask: {out}")


def run_one(
    asked: Asked, quiet: bool, like: Path | None = None, first: Sequence[str] = (), on: str = ""
) -> dict[str, Any]:
    """Run what was asked for on simulated devices, with a live line; returns the summary."""
    from foreseed.cli.progress import Watcher
    from foreseed.simulate import read_example, run_simulated

    example = None if like is None else read_example(like, asked.config)
    with Watcher(Console(stderr=True), quiet, first) as watch:
        summary = run_simulated(asked.config, asked.folder, **asked.how, watch=watch, like=example, on=on)
    return summary.model_dump()


def whole_runs(
    configs: Sequence[Config], folders: Sequence[Path], on: str, quiet: bool, resume: bool = True
) -> list[Summary]:
    """Runs side by side on Ray, with a line for each that ends; with `resume`, finished ones are not run again."""
    from foreseed.sweep import run_configs

    console = Console(stderr=True, markup=False, highlight=False)
    summaries: dict[int, Summary] = {}

    def told(index: int, outcome: Summary | str) -> None:
        if isinstance(outcome, str):
            raise ConfigError(outcome)
        summaries[index] = outcome
        if not quiet:
            said = f"{configs[index].run_name}: {100 * outcome.last_mean_accuracy:.1f} %"
            console.print(f"{len(summaries)}/{len(configs)} {said}", soft_wrap=True)

    run_configs(list(zip(configs, folders, strict=True)), told, on=on, resume=resume)
    return [summaries[index] for index in range(len(configs))]


def finish(runs: list[Path], folder: Path, as_json: bool, result: Any, explained: bool = False) -> None:
    """Write the report, and say how the runs ended; `explained`, also what that means and what to try next."""
    from foreseed.report import closing, console_table, summary_table, write_report

    page = write_report(runs, folder)
    if as_json:
        arms = [asdict(row) for row in summary_table(runs)]
        print(json.dumps({"report": str(page), "result": result, "arms": arms}))
        return
    console = Console(markup=False, highlight=False)
    console.print(console_table(runs))
    if explained:
        last = closing(runs, folder)
        console.print("", *last.sentences, "", "Try next:", sep="\n")
        for step in last.steps:
            console.print(f"  {step.command}\n      {step.why}", soft_wrap=True)
        console.print()
    console.print(f"report: {page}", soft_wrap=True)


def file_and_overrides(words: list[str]) -> tuple[Path | None, list[str]]:
    """The one experiment file that a command line gives, if any, and its overrides."""
    files, overrides = _split(words)
    if len(files) > 1:
        raise ConfigError(f"{len(files)} files given ({', '.join(map(str, files))}); expected one, or use compare")
    return files[0] if files else None, overrides


def tracked(words: list[str] | None, track: str) -> list[str]:
    """A command line's words with its --track, which is an override like any other."""
    return [*(words or []), *([f"track.to={track}"] if track else [])]


def ask(words: list[str], out: Path | None, resume: bool, at: int | None) -> Asked:
    """What a command line asks for. A run that is resumed needs no file: it has its own."""
    from foreseed.runs import asked

    if at is not None and not resume:
        raise ConfigError(f"--at {at} goes back in a run that is there; add --resume")
    file, overrides = file_and_overrides(words)
    if not resume:
        config = load(file, overrides)
        return Asked(config, out or Path("runs") / config.run_name)
    folder = out or Path("runs") / load(file, overrides).run_name
    config, changes = asked(folder, file, overrides)
    return Asked(config, folder, True, at, changes)


def config_of(words: list[str]) -> Config:
    """The one experiment that a command line gives."""
    return load(*file_and_overrides(words))


def described(asked: Asked, words: list[str]) -> list[str]:
    """What is about to be run, in a line, and how to choose something else if nothing was chosen."""
    config, d, density = asked.config, asked.config.data, asked.config.effective_density
    pruned = f" with {100 * density:g} % of its weights" if density < 1 else ""
    lines = [
        f"{config.run_name}: {config.method} trains {config.model.name}{pruned} on {d.set}, {config.rounds} rounds, "
        f"{d.per_round} of {d.devices} devices in each; in {asked.folder}"
    ]
    if not _split(words)[0] and not asked.resume:
        lines.insert(
            0,
            "no experiment given, so all is as by default; foreseed run demo is a tuned one, foreseed init DIR "
            "writes one of your own",
        )
    return lines


def _split(words: list[str]) -> tuple[list[Path], list[str]]:
    files = [Path(word) for word in words if "=" not in word]
    return files, [word for word in words if "=" in word]


def _arms(words: list[str], methods: str, pruners: str, seeds: str) -> list[Config]:
    files, overrides = _split(words)
    if methods and pruners:
        raise ConfigError("--methods and --pruners given, expected one of them; set the other for all, as method=NAME")
    if (option := "--methods" if methods else "--pruners" if pruners else "") and len(files) > 1:
        raise ConfigError(f"{option} takes one experiment file that all arms share; or give a file for each arm")
    if methods:
        base = load(files[0] if files else None, overrides)
        configs = [base.with_({"method": method.strip(), "name": ""}) for method in methods.split(",")]
    elif pruners:
        base = load(files[0] if files else None, overrides)
        if not base.is_pruned:
            raise ConfigError(
                f"--pruners {pruners}: method {base.method} at density {base.effective_density:g} keeps "
                "all weights, expected one that prunes; set method=ntk-baffle or ntk-fedavg, and prune.density below 1"
            )
        configs = [base.with_({"prune.pruner": name.strip(), "name": name.strip()}) for name in pruners.split(",")]
    else:
        configs = [load(file, overrides) for file in files]
    if len(configs) < 2 and not seeds:
        raise ConfigError(
            "one arm compares with nothing; give several files, or --methods a,b, or --pruners a,b, or --seeds 0,1,2"
        )
    return arms(configs, seed_numbers(seeds) if seeds else [])


def seed_numbers(seeds: str) -> list[int]:
    """The numbers that --seeds gives."""
    try:
        return [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds {seeds}: expected whole numbers, such as 0,1,2") from None


def _work(program: Program) -> dict[str, int]:
    return {"n_live": program.n_live, "flops": 2 * program.macs, "dense_flops": 2 * program.dense_macs}


def _densities(program: Program) -> Table:
    table = Table("layer", "weights", "live", "density", "MFLOPs dense", "live ", "ratio")
    layers = [layer for layer in program.layers() if layer.n_dense]
    for layer in layers:
        table.add_row(
            layer.name, f"{layer.n_dense:,}", f"{layer.n_weights:,}", f"{layer.density:.3f}",
            f"{2e-6 * layer.dense_macs:.3f}", f"{2e-6 * layer.macs:.3f}", f"{layer.macs / layer.dense_macs:.3f}",
        )  # fmt: skip
    live, dense = sum(layer.n_weights for layer in layers), sum(layer.n_dense for layer in layers)
    table.add_section()
    table.add_row(
        "all", f"{dense:,}", f"{live:,}", f"{live / dense:.3f}", f"{2e-6 * program.dense_macs:.3f}",
        f"{2e-6 * program.macs:.3f}", f"{program.macs / program.dense_macs:.3f}",
    )  # fmt: skip
    return table
