"""How much memory a device's process has held; `main` is one that is measured, see `foreseed.meter.process`."""

import sys
from array import array

from foreseed.device import Order, answer, open_shard
from foreseed.engine import Engine, ProgramHead


def main() -> None:
    """Answer an order (program, values and shard: files; k; spread; images at a time) and print the peak in bytes."""
    program_file, values_file, shard_file, k, spread, batch = sys.argv[1:]
    with open(program_file, "rb", buffering=0) as file:
        engine = Engine(ProgramHead(file.read()), batch=int(batch))
    values = array("f")
    with open(values_file, "rb", buffering=0) as file:
        values.frombytes(file.read())
    order = Order(seed=1, round=1, device=1, k=int(k), spread=int(spread))
    with open_shard(shard_file, engine.program.image_bytes, engine.program.classes) as shard:
        stats = engine.batch_stats(values, shard.samples) if engine.program.n_stats else None
        answer(engine, values, shard.samples, order, stats, release=shard.release)
    heavy = {"numpy", "torch"} & set(sys.modules)
    if heavy:
        sys.exit(f"a device process imported {', '.join(sorted(heavy))}, which it must not")
    print(peak_bytes())


def peak_bytes() -> int:
    """The most memory that this process has held so far, as the system counts it; 0 where it does not say."""
    try:
        with open("/proc/self/status", "rb") as status:
            return next((1024 * int(line.split()[1]) for line in status if line.startswith(b"VmHWM:")), 0)
    except OSError:
        return 0
