"""foreseed from Python: `load` an experiment, `run` it, `compare` several, and look at what came of it.

import foreseed as fs

config = fs.load("exp.toml", ["train.k=100"])
result = fs.run(config)
result.accuracy, result["train_loss"], result.model()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foreseed.config import Config, ConfigError, arms, load
from foreseed.engine import Program
from foreseed.engine.errors import ForeseedError
from foreseed.runs import Row, Run, Summary, Watch, read_run
from foreseed.simulate import run_simulated
from foreseed.trained import Evaluation, Prediction, Trained, evaluate, export, predict, read_trained

if TYPE_CHECKING:
    import pandas
    import torch

__all__ = ["Comparison", "Config", "ConfigError", "ForeseedError", "Result", "compare", "load", "read", "run"]

Folder = str | PathLike[str]
_RUNS = Path("runs")


class Result:
    """A finished run. `result["train_loss"]` is an array with a number a round; the names are those of `Row`."""

    def __init__(self, folder: Folder) -> None:
        """Read a run folder that is complete; `fs.run` does."""
        self.folder = Path(folder)
        self._run: Run = read_run(self.folder)

    def __repr__(self) -> str:
        s = self.summary
        return f"<Result {s.name}: {s.rounds} rounds, accuracy {s.final_accuracy:.4f}, in {self.folder}>"

    @property
    def summary(self) -> Summary:
        """What the run came to: accuracies, totals, memory, layers."""
        return self._run.summary

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every round, as metrics.jsonl has it."""
        return self._run.rounds

    @cached_property
    def config(self) -> Config:
        """What was run."""
        return load(self.folder / "config.toml")

    @property
    def accuracy(self) -> float:
        """On the test images, after the last round."""
        return self.summary.final_accuracy

    def keys(self) -> list[str]:
        """The names that were measured, in this run."""
        return [name for name in Row.model_fields if any(getattr(row, name) is not None for row in self.rows)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """A number a round: integers as int64, others as float64, NaN where a round was not tested or measured.

        What is no number, such as the participants, comes as an array of objects.
        """
        if name not in Row.model_fields:
            raise KeyError(f"{name!r}: a round has {', '.join(Row.model_fields)}")
        values = [getattr(row, name) for row in self.rows]
        if not all(value is None or isinstance(value, int | float) for value in values):
            column = np.empty(len(values), object)
            column[:] = values
            return column
        if all(isinstance(value, int) for value in values):
            return np.array(values, np.int64)
        return np.array([np.nan if value is None else value for value in values], np.float64)

    def curve(self, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """The rounds where there is such a number, and the numbers: `plt.plot(*result.curve("accuracy"))`."""
        column = self[name]
        known = np.array([getattr(row, name) is not None for row in self.rows])
        return self["round"][known], column[known]

    def to_pandas(self) -> pandas.DataFrame:
        """The rounds as a table, a column for each name."""
        return _pandas().DataFrame({name: self[name] for name in self.keys()})

    # What was trained.

    @cached_property
    def _trained(self) -> Trained:
        return read_trained(self.folder)

    @property
    def program(self) -> Program:
        """The structure as it was at the end: layers, shapes, and which weights live."""
        return self._trained.program

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by label."""
        return self._trained.classes

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """The trained vector: live weights, biases and norm parameters, in the order of the program."""
        return self._trained.values

    def model(self) -> torch.nn.Module:
        """The torch model with its trained weights, pruned ones 0; it takes what `inputs` makes of images."""
        return self._trained.model()

    def inputs(self, images: npt.NDArray[np.uint8]) -> torch.Tensor:
        """Images of bytes [N, channels, height, width] as the model was trained to see them, normalised."""
        return self._trained.inputs(images)

    def export(self, to: str, out: Folder | None = None) -> list[Path]:
        """Write the model for others to use, to "torch", "onnx", "fsp" or "c"; gives the files that were written."""
        return export(self._trained, to, out)

    def predict(self, images: npt.NDArray[np.uint8]) -> list[Prediction]:
        """What the engine says of images of bytes [N, channels, height, width]: a class and its probability each."""
        return predict(self._trained, images)

    def evaluate(self, data: str = "") -> Evaluation:
        """Accuracy, loss and accuracies by class on the run's own test images, or on another data set."""
        return evaluate(self._trained, data)

    def report(self) -> Path:
        """Write report.html and its figures into the run's folder."""
        from foreseed.report import write_report

        return write_report([self.folder], self.folder)


@dataclass(frozen=True)
class Comparison(Mapping[str, tuple[Result, ...]]):
    """The results of several arms, by name; an arm has a result for each seed."""

    folder: Path
    arms: Mapping[str, tuple[Result, ...]]

    def __getitem__(self, arm: str) -> tuple[Result, ...]:
        return self.arms[arm]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arms)

    def __len__(self) -> int:
        return len(self.arms)

    def accuracies(self) -> dict[str, npt.NDArray[np.float64]]:
        """The accuracy of every arm, a number for each seed."""
        return {arm: np.array([result.accuracy for result in results]) for arm, results in self.arms.items()}

    def to_pandas(self) -> pandas.DataFrame:
        """All rounds of all runs as one table, with the arm and the seed in front."""
        tables = [
            result.to_pandas().assign(arm=arm, seed=result.summary.seed)
            for arm, results in self.arms.items()
            for result in results
        ]
        table = _pandas().concat(tables, ignore_index=True)
        return table[["arm", "seed", *(name for name in table.columns if name not in ("arm", "seed"))]]

    def report(self) -> Path:
        """Write report.html, with all arms side by side."""
        from foreseed.report import write_report

        return write_report([result.folder for results in self.arms.values() for result in results], self.folder)


def run(
    config: Config,
    folder: Folder | None = None,
    *,
    resume: bool = False,
    at: int | None = None,
    changes: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
) -> Result:
    """Run an experiment on simulated devices; everything stays in its folder, as with `foreseed run`.

    Without a folder it is runs/NAME, or runs/NAME-2, runs/NAME-3 and so on if that is taken, so that a notebook's cell
    can be run again. With `resume`, a run that was stopped goes on in the folder given, or in runs/NAME; one that has
    finished is returned as it is. It goes back to round `at`, if a checkpoint of that is kept, and on with `changes`
    such as `{"train.lr": 0.001}`, if these may change. `watch` is shown the progress, round by round.
    """
    place = _free(_RUNS / config.run_name, resume) if folder is None else Path(folder)
    run_simulated(config, place, resume=resume, at=at, changes=changes, watch=watch)
    return Result(place)


def compare(
    configs: Sequence[Config],
    *,
    seeds: Sequence[int] = (),
    folder: Folder | None = None,
    resume: bool = False,
    watch: Watch | None = None,
) -> Comparison:
    """Run several arms on the same data, partition and initial weights, each with every seed.

    The runs are folders inside the one given, or inside runs/A-vs-B (or runs/A-vs-B-2, if that is taken). With
    `resume`, those that are complete stay, and the others go on.
    """
    runs = arms(configs, seeds)
    named = _RUNS / "-vs-".join(dict.fromkeys(config.run_name for config in configs))
    place = _free(named, resume) if folder is None else Path(folder)
    results = []
    for config in runs:
        at = place / config.run_name
        results.append(run(config, at, resume=resume and (at / "config.toml").exists(), watch=watch))
    each = len(seeds) or 1
    by_arm = {config.run_name: tuple(results[i * each : (i + 1) * each]) for i, config in enumerate(configs)}
    return Comparison(place, by_arm)


def read(folder: Folder) -> Result:
    """The result of a run that is there already, whether it was simulated or served."""
    return Result(folder)


def _free(folder: Path, resume: bool) -> Path:
    """The folder, or the next of its name that nothing is in yet."""
    if resume:
        return folder
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return folder if _is_empty(folder) else next(other for other in numbered if _is_empty(other))


def _is_empty(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def _pandas() -> Any:
    try:
        import pandas
    except ModuleNotFoundError:
        raise ForeseedError("to_pandas needs pandas, which is not installed here; pip install pandas") from None
    return pandas
