"""A model for PyTorch: its state_dict, and beside it a Python file that rebuilds the model around it."""

from __future__ import annotations

import re
from pathlib import Path

from foreseed.trained.model import ExportError, Trained

_SCRIPT = '''\
"""A model trained by foreseed: {model} for {shape} images and {count} classes.

from {module} import CLASSES, inputs, model

net = model()
names = [CLASSES[label] for label in net(inputs(images)).argmax(1)]  # images: uint8 [N, {commas}]
"""

from pathlib import Path

import torch

from foreseed.models import build

CLASSES = {classes!r}

# A pixel byte of a channel enters as byte * SCALE + SHIFT.
SCALE = torch.tensor({scale}).view(-1, 1, 1)
SHIFT = torch.tensor({shift}).view(-1, 1, 1)


def model():
    """The network with its trained weights; pruned ones are 0."""
    net = build({model!r}, {shape_tuple}, {count}, {options})
    net.load_state_dict(torch.load(Path(__file__).with_name({file!r}), weights_only=True))
    return net.eval()


def inputs(images):
    """Images of bytes as the network was trained to see them."""
    return torch.as_tensor(images).float() * SCALE + SHIFT
'''


def write_torch(trained: Trained, out: Path) -> list[Path]:
    """Write the state_dict, and the Python file that goes with it, of the same name as far as Python can import it."""
    import torch

    module = re.sub(r"\W", "_", out.stem, flags=re.ASCII)
    script = out.with_name(f"{'_' * module[0].isdigit()}{module}.py")
    if script.exists() or script == out:
        raise ExportError(f"{script}, which goes with {out.name}, exists; choose another --out")
    shape = trained.program.input_shape
    text = _SCRIPT.format(
        file=out.name, module=script.stem, model=trained.config.model.name, classes=trained.classes,
        shape="x".join(map(str, shape)), commas=", ".join(map(str, shape)), shape_tuple=shape,
        count=trained.program.classes, scale=list(trained.program.scale), shift=list(trained.program.shift),
        options=", ".join(f"{key}={value!r}" for key, value in trained.build_options().items()),
    )  # fmt: skip
    torch.save(trained.model().state_dict(), out)
    script.write_text(text, encoding="utf-8")
    return [out, script]
