"""From a torch model to the ops of a program, one op a layer (`compiler` then fuses them).

`forward` is traced symbolically, so own classes, skip connections and the functional style are all welcome.
"""

from __future__ import annotations

import operator
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from foreseed.engine.ops import Shape
from foreseed.models.errors import UnsupportedLayerError
from foreseed.models.layers import FUNCTIONS, METHODS, MODULES, Net, Refusal, Step, View, require

_TORCH = str(Path(torch.__file__).parent)


def trace(model: nn.Module, input_shape: Shape) -> tuple[list[Step], int]:
    """The ops of a model, unfused, and the number of the tensor that holds its logits."""
    graph = _symbolic(model)
    run = _Run(model, input_shape)
    for number, node in enumerate(graph.nodes):
        try:
            run.take(node)
        except Refusal as refusal:
            # Only now, and again, with the lines of the user's code: noting them takes torch two seconds to load.
            place = list(_symbolic(model, stack_traces=True).nodes)[number]
            raise UnsupportedLayerError(f"{_where(model, place)} {refusal}") from None
    return run.net.steps, run.result


class _Proxy(fx.Proxy):
    def __iadd__(self, other: Any) -> fx.Proxy:
        # fx takes `x += y` for `x = x + y`; but it changes every other name of x too, and a residual net may use one.
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __imul__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})


class _Tracer(fx.Tracer):
    def __init__(self, stack_traces: bool) -> None:
        super().__init__()
        self.record_stack_traces = stack_traces

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # A subclass of a known layer is a leaf as well, so that it is refused by its own name.
        return super().is_leaf_module(m, module_qualified_name) or isinstance(m, tuple(MODULES))

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


def _symbolic(model: nn.Module, stack_traces: bool = False) -> fx.Graph:
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise UnsupportedLayerError(
                f"{name or 'the model'} ({_type_name(type(module))}) has forward hooks, which a program cannot run; "
                "remove them first (torch.nn.utils.prune.remove) and pass what they prune as mask"
            )
    try:
        return _Tracer(stack_traces).trace(model)
    except Exception as error:  # whatever the user's forward raises when it is given a symbol in place of images
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if _is_own(f.filename)]
        reason = str(error).split(". ")[0]  # torch goes on with pointers to its own documentation
        at = f" at line {own[-1].lineno} of {Path(own[-1].filename).name}" if own else ""
        raise UnsupportedLayerError(
            f"forward of {_type_name(type(model))} cannot be traced{at} ({reason}); a program has no control flow: "
            "branch on the module's own attributes, not on tensors or their sizes; flatten with torch.flatten(x, 1)"
        ) from error


class _Run:
    """One pass over the traced graph."""

    def __init__(self, model: nn.Module, input_shape: Shape) -> None:
        self.model = model
        self.input_shape = input_shape
        self.net = Net()
        self.taken: dict[int, nn.Module] = {}
        self.called: set[int] = set()
        self.result = 0

    def take(self, node: fx.Node) -> None:
        """Understand one node: a module or a function called, an input, or the result."""
        env = self.net.env
        args: Any = fx.node.map_arg(node.args, env.__getitem__)
        kwargs: Any = fx.node.map_arg(node.kwargs, env.__getitem__)
        if node.op == "placeholder":
            require(not env, "is a second input; forward must take the batch of images alone")
            env[node] = View(0, self.input_shape)
        elif node.op == "output":
            self.result = _logits(args[0])
        elif node.op == "get_attr":
            env[node] = None  # a tensor of the model's own: no op takes one, so its reader is refused
        elif node.op == "call_module":
            module = self.model.get_submodule(str(node.target))
            self.net.name = str(node.target)
            handler = require(MODULES.get(type(module)), _unsupported(type(module).__name__))
            self.claim(module)
            env[node] = self.call(handler, (module, *args), kwargs)
        else:
            self.net.name = node.name
            env[node] = self.call(_function(node.target, args), args, kwargs)

    def claim(self, module: nn.Module) -> None:
        """Refuse parameters that a program could not hold, or would hold twice; a layer may be called again."""
        for tensor in (*module.parameters(), *module.buffers()):
            known = tensor.dtype in (torch.float32, torch.int64)
            require(known, f"has parameters of type {tensor.dtype}, expected torch.float32; call model.float()")
            owner = self.taken.setdefault(id(tensor), module)
            require(owner is module, "uses parameters of another layer; call that layer twice, or give each its own")
        statistics = any(isinstance(module, kind) for kind in (nn.BatchNorm1d, nn.BatchNorm2d))
        again = statistics and id(module) in self.called
        require(not again, "is called twice, and its statistics are of one call; give each call a layer of its own")
        self.called.add(id(module))

    def call(self, handler: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return handler(self.net, *args, **kwargs)
        except (TypeError, ValueError, AttributeError, IndexError):
            raise Refusal(f"is called with arguments that a program has no meaning for: {args} {kwargs}") from None


def _function(target: Any, args: Any) -> Callable[..., Any]:
    # With sizes only, as in `x.view(x.size(0), x.size(1) * 4)`.
    if getattr(target, "__module__", "") == "_operator" and not any(isinstance(a, View) for a in args):
        return lambda net, *sizes: target(*sizes)
    table = METHODS if isinstance(target, str) else FUNCTIONS
    handler: Callable[..., Any] = require(table.get(target), _unsupported(str(target)))
    return handler


def _logits(result: Any) -> int:
    require(isinstance(result, View), "returns something that is not one tensor; return the logits alone")
    is_row = result.flat and result.shape[1:] == (1, 1)
    require(is_row, f"returns {result}, expected a row of logits for each image; end it with a Linear layer")
    require(result.shape[0] <= 256, f"returns {result.shape[0]} logits; a label is one byte, so at most 256 classes")
    return int(result.tensor)


def _unsupported(name: str) -> str:
    if "softmax" in name.lower():
        return "has no place in a program: the loss is cross entropy on logits; leave it out and return the logits"
    layers = ", ".join(kind.__name__ for kind in MODULES)
    return f"is not supported; supported are {layers}, their functions, +, *, cat, view, reshape and mean((2, 3))"


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_own(file: str) -> bool:
    """Whether a file is the user's, not torch's or ours."""
    return not file.startswith(_TORCH) and file != __file__


def _where(model: nn.Module, node: fx.Node) -> str:
    """The place of a node in the user's terms."""
    if node.op == "call_module":
        return f"{node.target} ({_type_name(type(model.get_submodule(str(node.target))))})"
    path, kind = [("", type(model)), *node.meta.get("nn_module_stack", {}).values()][-1]
    forward = f"forward of {path} ({_type_name(kind)})" if path else f"forward of {_type_name(kind)}"
    if node.op == "output":
        return forward
    calls = re.findall(r'File "(.+)", line (\d+), in', node.stack_trace or "")
    lines = [f", line {line} of {Path(file).name}," for file, line in calls if _is_own(file)]
    name = getattr(node.target, "__name__", node.target)
    return f"{name} in {forward}{''.join(lines[-1:])}"
