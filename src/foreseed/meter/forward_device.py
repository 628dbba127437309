"""A device process that answers one order, for its memory to be measured. Imports what a device does, no more."""

from __future__ import annotations

import sys
from array import array

from foreseed.device.answer import Order, answer
from foreseed.device.shard import open_shard
from foreseed.engine import Engine, ProgramHead


def main(folder: str, batch: int) -> None:
    with open(f"{folder}/program", "rb") as file:
        program = ProgramHead(file.read())
    values = array("f", bytes(4 * program.n_live))
    engine = Engine(program, batch=batch)
    with open_shard(f"{folder}/shard", program.image_bytes, program.classes) as shard:
        answer(engine, values, shard.samples, Order(seed=0, round=1, device=0, k=2), release=shard.release)
    with open("/proc/self/status") as status:
        print(next(line.split()[1] for line in status if line.startswith("VmHWM")))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
