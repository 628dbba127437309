"""`foreseed bench`: the engine, what devices need, pruners, the simulator, Ray, estimates, liars and fleets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import fsum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from foreseed.bench.machine import instruction_set
from foreseed.cli.experiment import seed_numbers
from foreseed.engine.errors import ForeseedError

app = typer.Typer(no_args_is_help=True, help="Measure the engine on this machine, beside what else there is.")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def engine(
    cases: Annotated[
        str | None, typer.Option(help="Which cases, such as lenet5-90,resnet20-90; all if not given.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Seconds of timing for each case and number of threads.")] = 10.0,
    threads: Annotated[str | None, typer.Option(help="Numbers of threads; 1,2 if not given.")] = None,
    images: Annotated[
        int | None, typer.Option(min=1, help="Images of a probe; few make short turns, for a machine that is shared.")
    ] = None,
    layers: Annotated[
        bool,
        typer.Option(
            "--layers",
            help="Where the engine's own time goes, layer by layer (an add right behind a norm: in the norm).",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """How fast perturbed copies of a model are probed, beside PyTorch, ONNX Runtime and a matrix product.

    Example: foreseed bench engine --cases lenet5-90 --threads 1
    """
    _need_engine()
    if layers:
        if threads is not None:
            raise ForeseedError("--layers measures one thread: leave --threads out")
        _layers(cases, seconds, images, as_json)
        return
    from foreseed.bench.cases import parse_names
    from foreseed.bench.engine import bench_engine
    from foreseed.bench.measure import parse_threads

    names, numbers = parse_names(cases), parse_threads(threads)
    with progress_lines() as progress:
        result = bench_engine(names, seconds, numbers, images, progress=progress)
    if as_json:
        print(json.dumps(result))
        return
    console = Console()
    console.print(_engine_table(result))
    for line in _engine_lines(result):
        console.print(line, soft_wrap=True, highlight=False)


def _layers(cases: str | None, seconds: float, images: int | None, as_json: bool) -> None:
    from foreseed.bench.cases import parse_names
    from foreseed.bench.layers import bench_layers

    names = parse_names(cases)
    with progress_lines() as progress:
        result = bench_layers(names, seconds, images, progress)
    if as_json:
        print(json.dumps(result))
        return
    console = Console()
    for case in result["cases"]:
        console.print(_layers_table(case))
        console.print(
            f"A probe of {case['images']} images on one thread takes {case['ms']:.2f} ms, {case['gemm_share']:.2f} of "
            f"the rate of a matrix product ({case['gemm_gmac_per_s']:.1f} GMAC/s); live weights only.",
            soft_wrap=True,
            highlight=False,
        )


@app.command()
def code(as_json: Json = False) -> None:
    """How many bytes of code the engine takes on a Cortex-M4, and what a build saves that leaves a layer out.

    Example: foreseed bench code --json
    """
    from foreseed.bench.code_size import bench_code

    with progress_lines() as progress:
        result = bench_code(progress)
    if as_json:
        print(json.dumps(result))
        return
    console = Console()
    console.print(_code_table(result))
    console.print(
        f"Code on a Cortex-M4 (-Os): {result['whole']:,} bytes with all layers, {result['least']:,} with convolutions, "
        "linear layers and ReLU alone. Leave layers out with -DFS_WITHOUT='FS_LAYER_GELU|FS_LAYER_CAT'.",
        soft_wrap=True,
        highlight=False,
    )


@app.command()
def instructions(
    cases: Annotated[str, typer.Option(help="Which cases, such as lenet5-90,resnet20-90.")] = "lenet5-90,lenet5-dense",
    as_json: Json = False,
) -> None:
    """How many instructions a probe takes on ARM (counted in an emulator).

    On 64 bits in plain C and with NEON, many images at a time; and as on a microcontroller (a Cortex-M4's instructions
    and float unit, -Os), one at a time.

    Example: foreseed bench instructions --cases lenet5-90
    """
    _need_engine()
    from foreseed.bench.cases import parse_names
    from foreseed.bench.instructions import bench_instructions

    names = parse_names(cases)
    with progress_lines() as progress:
        result = bench_instructions(names, progress)
    if as_json:
        print(json.dumps(result))
        return
    for row in result["cases"]:
        per_mac = row["per_mac"]
        print(
            f"{row['case']}: instructions for each MAC of live weights: on 64-bit ARM {per_mac['plain']:.2f} in plain "
            f"C, {per_mac['neon']:.2f} with NEON (1/{row['ratio']:.2f}); on a microcontroller "
            f"{per_mac['microcontroller']:.2f}"
        )


@app.command()
def memory(as_json: Json = False) -> None:
    """What a device needs: planned, observed and of a whole process, beside a PyTorch process that trains.

    Example: foreseed bench memory --json
    """
    _need_engine()
    from foreseed.bench.memory import bench_memory

    with progress_lines() as progress:
        result = bench_memory(progress=progress)
    if as_json:
        print(json.dumps(result))
        return
    console = Console()
    console.print(_memory_table(result))
    for line in _memory_lines(result):
        console.print(line, soft_wrap=True, highlight=False)


@app.command()
def prune(
    models: Annotated[
        str | None, typer.Option(help="Which models, such as lenet5-relu,resnet20-batch; all if not given.")
    ] = None,
    densities: Annotated[
        str, typer.Option(help="Shares of weights that live, since a pruning goes from 1 to a small one.")
    ] = "1,0.3,0.1",
    seconds: Annotated[
        float, typer.Option(help="Seconds of timing for each model and density, at least three turns.")
    ] = 20.0,
    draws: Annotated[
        int, typer.Option(min=1, help="Draws of 100 inputs an iteration; fewer keep turns short on a shared machine.")
    ] = 5,
    as_json: Json = False,
) -> None:
    """How long an iteration of NTK pruning takes, beside torch's float64, and float32, whose masks are not portable.

    Example: foreseed bench prune --models lenet5-hardswish --densities 1,0.1
    """
    _need_engine()
    from foreseed.bench.prune import bench_prune, parse_models
    from foreseed.bench.pruners import parse_densities

    names, shares = parse_models(models), parse_densities(densities)
    with progress_lines() as progress:
        result = bench_prune(names, shares, seconds, draws=draws, progress=progress)
    if as_json:
        print(json.dumps(result))
        return
    console, settings = Console(), result["settings"]
    console.print(_prune_table(result))
    console.print(
        f"Draws of {settings['batch']} inputs: {settings['redraws']}; threads: {result['threads']}.", highlight=False
    )


@app.command()
def pruners(
    names: Annotated[
        str, typer.Option("--pruners", help="Which pruners; ntk-rand, ntk-ori and erk can be had too.")
    ] = "synflow,snip,grasp,random,magnitude",
    densities: Annotated[str, typer.Option(help="Shares of weights to keep.")] = "0.01",
    seeds: Annotated[str, typer.Option(help="Seeds that each figure is the mean of.")] = "0,1,2",
    as_json: Json = False,
) -> None:
    """What pruners leave of a small VGG at high compression: accuracy on digits, trained by backpropagation.

    Example: foreseed bench pruners --densities 0.02,0.01 --seeds 0,1
    """
    _need_engine()
    from foreseed.bench.pruners import bench_pruners, parse_densities, parse_pruners

    chosen, shares, numbers = parse_pruners(names), parse_densities(densities), seed_numbers(seeds)
    with progress_lines() as progress:
        result = bench_pruners(chosen, shares, numbers, progress=progress)
    if as_json:
        print(json.dumps(result))
        return
    console = Console()
    console.print(_pruners_table(result))
    console.print(
        f"{result['epochs']} epochs of SGD; mean and standard deviation over seeds "
        f"{', '.join(map(str, result['seeds']))}.",
        soft_wrap=True,
        highlight=False,
    )


@app.command()
def simulator(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to run; the best one counts.")] = 20, as_json: Json = False
) -> None:
    """What the simulator adds to the engine's own time, for each device and round.

    Example: foreseed bench simulator --json
    """
    _need_engine()
    from foreseed.bench.simulator import bench_simulator

    result = bench_simulator(rounds)
    if as_json:
        print(json.dumps(result))
        return
    print(
        f"{result['overhead_ms']:.3f} ms a device and round outside the engine, {result['engine_ms']:.3f} ms inside it"
    )


@app.command()
def ray(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each contender; the best ones count.")] = 50,
    as_json: Json = False,
) -> None:
    """What Ray on this machine adds to a device and round beside threads, and what a second worker gains.

    Example: foreseed bench ray --rounds 100
    """
    _need_engine()
    from foreseed.bench.ray import bench_ray

    with progress_lines() as progress:
        result = bench_ray(rounds, progress)
    if as_json:
        print(json.dumps(result))
        return
    k, gain = result["k"], result["gain"]
    for row in result["overhead"]:
        many = "1 worker" if row["workers"] == 1 else f"{row['workers']} workers"
        print(
            f"{many}: Ray adds {row['overhead_ms']:.2f} ms to a device and round (threads take "
            f"{row['threads_ms']:.2f} ms, Ray {row['ray_ms']:.2f} ms, K = {k['overhead']})"
        )
    print(
        f"two workers of Ray are {gain['ray']:.2f} times as fast as one; two threads, {gain['threads']:.2f} times "
        f"(K = {k['gain']})\nLeNet-5 at density 0.1, {result['devices']} devices a round with "
        f"{result['samples_per_device']:.0f} images each; the best of {result['rounds']} rounds"
    )


@app.command()
def signs(
    k: Annotated[int, typer.Option(min=1, help="Directions that each of two devices probes.")] = 160,
    central: Annotated[bool, typer.Option("--central", help="Central differences, at twice the passes.")] = False,
    as_json: Json = False,
) -> None:
    """How often a finite difference has the sign of the exact slope: what train.bits = 1 sends.

    Example: foreseed bench signs --k 1000
    """
    _need_engine()
    from foreseed.bench.signs import bench_signs

    with progress_lines() as progress:
        result = bench_signs(k, central, progress=progress)
    if as_json:
        print(json.dumps(result))
        return
    console = Console()
    console.print(_signs_table(result))
    console.print(
        f"{result['difference']} differences, {result['directions']} directions, parts of {result['images']} images, "
        f"density {result['density']:g}, initial values.",
        soft_wrap=True,
        highlight=False,
    )


@app.command()
def estimate(
    draws: Annotated[int, typer.Option(min=2, help="Rounds that each number is the mean of.")] = 8,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the figure: estimate.svg, .png, and its numbers as .csv.")
    ] = None,
    as_json: Json = False,
) -> None:
    """How far an estimate is from the gradient, by K, spread, bits and live weights, beside what theory says.

    Example: foreseed bench estimate --out docs
    """
    _need_engine()
    from foreseed.bench.estimate import bench_estimate

    with progress_lines() as progress:
        result = bench_estimate(draws, progress=progress)
    if out is not None:
        from foreseed.bench.estimate_figure import draw

        draw(result["rows"], out)
    if as_json:
        print(json.dumps(result))
        return
    console = Console()
    console.print(_estimate_table(result))
    for line in _estimate_lines(result):
        console.print(line, soft_wrap=True, highlight=False)


@app.command()
def liars(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as train.robust=none.")] = None,
    rounds: Annotated[int, typer.Option(min=10, help="Rounds of each run.")] = 60,
    seeds: Annotated[str, typer.Option(help="Seeds that each figure is the mean of.")] = "0,1",
    lie: Annotated[list[str] | None, typer.Option(help="A kind of lie; repeat it for more. All, if not given.")] = None,
    as_json: Json = False,
) -> None:
    """What devices that lie cost: points of accuracy lost with 1, 2 and 4 of 10 devices lying, by kind of lie.

    Example: foreseed bench liars train.bits=1 --seeds 0,1
    """
    _need_engine()
    from foreseed.bench.liars import LIES, bench_liars

    if unknown := [name for name in lie or () if name not in LIES]:
        raise ForeseedError(f"--lie {unknown[0]}: expected one of {'; '.join(LIES)}")
    numbers = seed_numbers(seeds)
    with progress_lines() as progress:
        result = bench_liars(rounds, numbers, overrides or [], lie or tuple(LIES), progress)
    if as_json:
        print(json.dumps(result))
        return
    console = Console()
    console.print(_liars_table(result))
    console.print(
        f"{result['rounds']} rounds, robust {result['robust']}, {result['bits']} bits, seeds "
        f"{', '.join(map(str, result['seeds']))}; the mean of the last five tests.",
        soft_wrap=True,
        highlight=False,
    )


@app.command()
def fleet(
    devices: Annotated[int, typer.Option(min=1, help="Devices that are connected.")] = 10,
    per_round: Annotated[int, typer.Option(min=1, help="Devices asked in a round.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to run.")] = 20,
    light: Annotated[bool, typer.Option(help="Hundreds of devices in a process, without TLS.")] = False,
    cluster: Annotated[bool, typer.Option(help="Once with one mosquitto, then with three nodes of NATS.")] = False,
    as_json: Json = False,
) -> None:
    """Bytes on the wire, memory of device processes, and time of a round beyond its computing.

    Example: foreseed bench fleet --devices 1000 --per-round 50 --rounds 100 --light
    """
    _need_engine()
    from foreseed.bench.fleet import bench_fleet, bench_light_fleet

    with progress_lines() as progress:
        measure, brokers = bench_light_fleet if light else bench_fleet, (False, True) if cluster else (False,)
        results = [measure(devices, per_round, rounds, progress, nodes) for nodes in brokers]
    if as_json:
        print(json.dumps(results if cluster else results[0]))
        return
    for result in results:
        _print_fleet(result)


def _print_fleet(result: dict[str, Any]) -> None:
    print(
        f"{result['replies']} replies of {result['devices']} devices ({result['agents']}, {result['broker']}, TLS "
        f"{'on' if result['tls'] else 'off'}) in {result['rounds']} rounds, {result['refused']} messages refused\n"
        f"a device and round: {result['payload_up_bytes']:.0f} bytes of payload up, "
        f"{result['payload_down_bytes']:.0f} down; on the wire {result['wire_up_bytes']:.0f} up, "
        f"{result['wire_down_bytes']:.0f} down; a reply alone {result['reply_wire_bytes']:.0f} on the wire\n"
        f"a round takes {result['round_overhead_ms']:.1f} ms beyond its slowest device's computing (median)"
    )
    if "broker_bytes" in result:
        answers = (
            f", {result['broker_answer_ms']:.2f} and {result['server_answer_ms']:.2f} ms for each answer after that"
            if result["broker_answer_ms"] is not None
            else ", answers included, since devices joined until the last round"
        )
        print(
            f"CPU of broker and server: {result['broker_join_ms']:.2f} and {result['server_join_ms']:.2f} ms for each "
            f"of the {result['joined']} devices that joined{answers}; memory of the broker: "
            f"{result['broker_bytes'] / 1e3:.0f} kB a connection"
        )
    if result["device_peak_mb"]:
        print(f"the largest device process held {result['device_peak_mb']:.1f} MB")


def _pruners_table(result: dict[str, Any]) -> Table:
    table = Table("density", "pruner", "accuracy", "by seed")
    for row in result["rows"]:
        spread = "" if row["std"] is None else f" ± {100 * row['std']:.1f}"
        each = ", ".join(f"{100 * accuracy:.1f}" for accuracy in row["accuracies"])
        table.add_row(f"{row['density']:g}", row["pruner"], f"{100 * row['mean']:.1f} %{spread}", each)
    return table


def _liars_table(result: dict[str, Any]) -> Table:
    shares = sorted({row["tenths"] for row in result["rows"]})
    table = Table("lie", *(f"{share} of 10: accuracy (lost)" for share in shares), "replies refused")
    honest = [accuracy for accuracy in result["honest"] if accuracy is not None]
    table.add_row("none", *[f"{100 * fsum(honest) / len(honest):.1f}" if honest else "broke down"] * len(shares), "0")
    for lie in dict.fromkeys(row["lie"] for row in result["rows"]):
        cells, reasons = [], set[str]()
        for share in shares:
            runs = [row for row in result["rows"] if (row["lie"], row["tenths"]) == (lie, share)]
            reasons |= {reason for row in runs for reason in row["refused"]}
            ended = [row for row in runs if row["accuracy"] is not None]
            mean = {key: 100 * fsum(row[key] for row in ended) / max(len(ended), 1) for key in ("accuracy", "lost")}
            broken = f", {len(runs) - len(ended)} of {len(runs)} broke down" if len(ended) < len(runs) else ""
            cells.append(f"{mean['accuracy']:.1f} ({mean['lost']:.1f}){broken}" if ended else "broke down")
        table.add_row(lie, *cells, ", ".join(sorted(reasons)) or "0")
    return table


def _signs_table(result: dict[str, Any]) -> Table:
    shares = {(row["model"], row["sigma"]): row["agree"] for row in result["rows"]}
    sigmas = list(dict.fromkeys(sigma for _, sigma in shares))
    table = Table("model", title="directions whose difference has the sign of the exact slope, by sigma")
    for sigma in sigmas:
        table.add_column(f"{sigma:g}", justify="right")
    for model in dict.fromkeys(model for model, _ in shares):
        table.add_row(model, *(f"{100 * shares[model, sigma]:.1f} %" for sigma in sigmas))
    return table


def _estimate_table(result: dict[str, Any]) -> Table:
    table = Table("sweep", "series", title="estimates: |g_hat - g|^2 / |g|^2, and the cosine of g_hat and g")
    for name in ("n_live", "K", "spread", "bits", "error", "law", "cosine", "law", "cos^2 |g|^2"):
        table.add_column(name, justify="right")
    last = None
    for row in result["rows"]:
        if last not in (None, row["sweep"]):
            table.add_section()
        last = row["sweep"]
        table.add_row(
            row["sweep"], row["series"], *(f"{row[key]:,}" for key in ("n_live", "k", "spread", "bits")),
            f"{row['error']:.3g} ± {row['error_se']:.2g}", f"{row['error_law']:.3g}",
            f"{row['cosine']:.4f} ± {row['cosine_se']:.4f}", f"{row['cosine_law']:.4f}", f"{row['progress']:.3g}",
        )  # fmt: skip
    return table


def _estimate_lines(result: dict[str, Any]) -> Iterator[str]:
    rows = result["rows"]
    near = sum(abs(row["error"] - row["error_law"]) < 2 * row["error_se"] for row in rows)
    above = fsum(row["error"] / row["error_law"] - 1 for row in rows) / len(rows)
    yield f"{near} of {len(rows)} errors lie within two standard errors of the law; the mean is {above:+.1%} off it."
    yield (
        f"Mean of {result['draws']} rounds ± its standard error. LeNet-5, one device's digits, exact slopes; the "
        "gradients:"
    )
    for g in result["gradients"]:
        net = "dense" if g["density"] == 1 else f"{g['pruner']} mask of density {g['density']:g}"
        yield (
            f"{net}, {g['steps']} steps, {g['images']} images: |g|^2 {g['gradient_square']:.3g}, a live weight "
            f"{g['gradient_square'] / g['n_live']:.3g}; rho {g['rho']:.3g}"
        )


def _need_engine() -> None:
    if instruction_set() is None:
        raise ForeseedError(
            "the C engine is not built, so there is nothing to measure; install a compiler and foreseed again"
        )


@contextmanager
def progress_lines() -> Iterator[Callable[[str], None]]:
    """A live line on a terminal, plain lines elsewhere; on standard error, so that results can be piped."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda said: console.print(said, soft_wrap=True, highlight=False)
        return
    with console.status("") as status:
        yield status.update


def _engine_table(result: dict[str, Any]) -> Table:
    names = list(result["cases"][0]["contenders"])
    # Narrow enough for a terminal of 80 columns.
    table = Table("case", title="probes a second (and GMAC/s; live weights only for foreseed)")
    for name in (*(name.replace("_", "\n") for name in names), "GEMM\nGMAC/s", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["cases"]:
        cells = [_contender_cell(name, row) for name in names]
        limit = f"{row['gemm_gmac_per_s']:.1f}", f"{row['gemm_share']:.2f}"
        threads = f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"
        table.add_row(f"{row['case']}\n{threads}", *cells, *limit)
    return table


def _layers_table(case: dict[str, Any]) -> Table:
    table = Table("layer", title=f"{case['case']}: where the time of a probe goes")
    for name in ("ms", "of the time", "million MACs", "GMAC/s", "of GEMM"):
        table.add_column(name, justify="right")
    for row in case["rows"]:
        rate = (
            (f"{row['macs'] / 1e6:,.1f}", f"{row['gmac_per_s']:.1f}", f"{row['gemm_share']:.2f}") if row["macs"] else ()
        )
        table.add_row(row["layer"], f"{row['ms']:.3f}", f"{100 * row['share_of_time']:.1f} %", *rate)
    return table


def _contender_cell(name: str, row: dict[str, Any]) -> str:
    measured = row["contenders"][name]
    if isinstance(measured, str):
        return measured
    ratio = row["ratio"].get(name)
    beside = "" if ratio is None else f"\n1/{ratio:.1f}"
    rate = measured["probes_per_s"]
    return f"{rate:{',.0f' if rate >= 100 else '.3g'}}\n({measured['gmac_per_s']:.1f}){beside}"


def _engine_lines(result: dict[str, Any]) -> Iterator[str]:
    yield "1/n: foreseed is n times as fast. share: foreseed's GMAC/s over those of a matrix product on the same cores."
    for case, gain in result["two_thread_speedup"].items():
        yield f"{case}: two threads probe {gain:.2f} times as fast as one."
    for case, settings in result["settings"].items():
        yield f"{case}: " + "; ".join(f"{name}: {value}" for name, value in settings.items())
    size = result["cortex_m_code_bytes"]
    if size is None:
        yield "Code on a Cortex-M4: not known (needs arm-none-eabi-gcc on PATH and the source tree)."
    else:
        yield f"Code on a Cortex-M4 (-Os): {size:,} bytes."


def _code_table(result: dict[str, Any]) -> Table:
    table = Table("left out", title="bytes of code saved")
    table.add_column("bytes", justify="right")
    for name, saved in result["saved"].items():
        table.add_row(name, f"{saved:,}")
    return table


def _prune_table(result: dict[str, Any]) -> Table:
    table = Table("model", "density", title="seconds an iteration (and how many times those of live weights)")
    for name in result["models"][0]["seconds"]:
        table.add_column(name, justify="right")
    for row in result["models"]:
        cells = [
            f"{seconds:.2f}" + (f" ({row['ratio'][name]:.2f})" if name in row["ratio"] else "")
            for name, seconds in row["seconds"].items()
        ]
        table.add_row(row["model"], f"{row['density']:g}", *cells)
    return table


def _memory_table(result: dict[str, Any]) -> Table:
    table = Table(
        "", title="bytes planned, bytes observed in a run, and MB (10^6 bytes) of whole processes at their peak"
    )
    for row in result["models"]:
        table.add_column(f"{row['model']}\ndensity {row['density']:g}", justify="right")
    for name, path in _memory_rows(result["models"][0]["planned_bytes"]["parts"]):
        table.add_row(name, *(_number(row, path) for row in result["models"]))
    return table


def _memory_rows(parts: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The lines of the table: what a person reads, and where it stands in the result."""
    yield "planned, batch 1", ("planned_bytes", "batch_1")
    for part in parts:
        yield f"  {part}", ("planned_bytes", "parts", part)
    yield "planned, batch 32", ("planned_bytes", "batch_32")
    yield "planned, smallest possible", ("planned_bytes", "smallest")
    yield "observed, batch 1", ("observed_bytes", "batch_1")
    yield "observed, batch 32", ("observed_bytes", "batch_32")
    yield "device process, MB", ("process_peak_mb",)
    yield "PyTorch BP process, MB", ("torch_bp_process_peak_mb",)


def _number(row: dict[str, Any], path: Iterable[str]) -> str:
    found: Any = row
    for key in path:
        found = found[key]
    return f"{found:,}" if isinstance(found, int) else f"{found:,.1f}"


def _memory_lines(result: dict[str, Any]) -> Iterator[str]:
    order = result["order"]
    yield f"A bare Python interpreter takes {result['bare_interpreter_mb']:.1f} MB of each device process."
    yield (
        f"Device process: batch 1, {order['k']} directions, spread {order['spread']}, {order['images']} images in a "
        "mapped file. PyTorch process: one step of SGD with momentum, batch 32."
    )
