"""A process that trains by backpropagation, whose memory is measured beside a device's."""

import sys

import torch

from foreseed.bench.cases import SHAPE, make_model
from foreseed.bench.device_process import peak_bytes


def main() -> None:
    """Take one step of SGD with momentum on 32 images of a case, and print the peak in bytes."""
    torch.set_num_threads(1)
    model, _ = make_model(sys.argv[1])
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.rand(32, *SHAPE), torch.zeros(32, dtype=torch.int64)
    torch.nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    print(peak_bytes())
