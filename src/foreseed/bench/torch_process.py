"""A process that trains by backpropagation, whose memory is measured beside a device's."""

import sys

import torch

from foreseed.bench.cases import make_case
from foreseed.bench.device_process import peak_bytes


def main() -> None:
    """Take one step of SGD with momentum on 32 images of a case, and print the peak in bytes."""
    torch.set_num_threads(1)
    case = make_case(sys.argv[1], images=32)
    optimiser = torch.optim.SGD(case.model.parameters(), lr=0.01, momentum=0.9)
    torch.nn.functional.cross_entropy(case.model(case.images), case.labels).backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    print(peak_bytes())
