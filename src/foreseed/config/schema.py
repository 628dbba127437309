"""Every key of an experiment: its type, its default, its bounds and its trade-off."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from foreseed.config import presets, toml
from foreseed.config.errors import ConfigError, did_you_mean, explain, rule
from foreseed.config.method_registry import Method, entered, methods
from foreseed.config.tracker_registry import trackers

# Rounds, devices and directions are 32-bit words of the random generator's counter.
Count: TypeAlias = Annotated[int, Field(ge=1, le=2**32 - 1)]
# The bound keeps numbers inside float32, which is what devices compute with.
Positive: TypeAlias = Annotated[float, Field(gt=0, le=10**9)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0, le=10**9)]

# Written out, since the rooms that hold them import NumPy and PyTorch, which a config does not need.
DATA_SETS = ("digits", "mnist", "fashion-mnist", "cifar10", "cifar100")
MODELS = (
    "lenet5", "lenet5-wide", "resnet20", "mobilenetv2-tiny", "mobilenetv3-small", "squeezenet", "dscnn", "lenet-baffle"
)  # fmt: skip


T = TypeVar("T", bound="Table")


class Table(BaseModel):
    """Keys that belong together: all typed and described, none unknown."""

    # Strict: true is no number and 300.0 no integer. Defaults are checked too, against the keys that were given.
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _printable(cls, value: Any) -> Any:
        if isinstance(value, str) and not value.isprintable():
            raise rule("text of printable characters")
        return value


class Data(Table):
    """The keys of [data]."""

    set: str = Field(
        default="digits",
        description="digits is built in and quick, cifar10 and cifar100 are the paper's; or ./folder or file.npz",
    )
    root: str = Field(default="", description='where data sets lie; "" = $FORESEED_DATA, or the cache')
    size: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="height and width of a folder's images: more show more, at a cost that grows as the square; 0 = 32",
    )
    channels: int = Field(
        default=0,
        ge=0,
        le=64,
        description="of a folder or digits: 1 is grey and cheaper, 3 (or 0) RGB; of an .npz file, if they come last",
    )
    partition: Literal["dirichlet", "iid", "k-classes"] = Field(
        default="dirichlet",
        description="dirichlet: uneven, the paper's; iid: the easy case; k-classes: few classes a device",
    )
    beta: Positive = Field(default=0.3, description="dirichlet: 0.1 is very uneven and hard, 100 nearly even")
    classes_per_device: Count = Field(default=2, description="k-classes: fewer are harder")
    devices: Count = Field(default=20, description="more devices hold fewer images each")
    per_round: Count = Field(
        default=10, description="devices asked in a round: more mean less noise, at that much more cost"
    )
    min_size: Count = Field(
        default=10, description="dirichlet: fewest images of a device; more steady the round, but even the shares out"
    )

    @property
    def source(self) -> tuple[str, str | None, int, int]:
        """What `foreseed.data.load` takes."""
        return self.set, self.root or None, self.size, self.channels

    @field_validator("set")
    @classmethod
    def _known_set(cls, value: str) -> str:
        if value not in DATA_SETS and not re.search(r"[./\\]", value):
            names = ", ".join(DATA_SETS)
            raise rule(f"one of {names}, or a path such as ./folder or file.npz{did_you_mean(value, DATA_SETS)}")
        return value

    @field_validator("per_round")
    @classmethod
    def _no_more_than_there_are(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("devices", value):
            raise rule(f"at most data.devices, which is {info.data['devices']}")
        return value


class Model(Table):
    """The keys of [model]."""

    name: str = Field(
        default="lenet5",
        description="lenet5 is small, resnet20 slow and better, docs/layers.md has more; or package.module:factory",
    )
    activation: Literal["hardswish", "relu"] = Field(
        default="hardswish",
        description="lenet5, resnet20: hardswish is smooth, which suits probing by small steps; relu is a bit cheaper",
    )
    norm: Literal["group", "batch", "none"] = Field(
        default="group",
        description="of nets with norms: group keeps no statistics, batch (paper) sends them; none: lenet-baffle",
    )
    init: Literal["kaiming", "torch"] = Field(
        default="kaiming",
        description="kaiming keeps the signal's size from layer to layer; torch, PyTorch's own, starts smaller",
    )
    weights: str = Field(
        default="",
        description='a file to start from (.pt, .pth, .safetensors, .npz), pruned by its own weights; "" = from init',
    )

    @field_validator("name")
    @classmethod
    def _known_model(cls, value: str) -> str:
        if value not in MODELS and ":" not in value:
            raise rule(f"one of {', '.join(MODELS)}, or package.module:factory{did_you_mean(value, MODELS)}")
        return value


class Prune(Table):
    """The keys of [prune]."""

    pruner: Literal["ntk-rand", "ntk-ori", "snip", "grasp", "synflow", "magnitude", "erk", "random"] = Field(
        default="ntk-rand",
        description="ntk-rand, synflow need no data; ntk-ori, snip, grasp make devices backpropagate; others: controls",
    )
    density: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="share of weights that live: few are cheap and well estimated, but express less",
    )
    iterations: Count = Field(default=50, description="pruning in more, smaller steps chooses better and takes longer")
    redraws: Count = Field(
        default=5, description="draws a step: below 5 dead units mislead the scores; time grows with it"
    )
    redraw_weights: bool = Field(
        default=True,
        description="true scores the architecture, over fresh weights; false the initial ones, as model.weights always",
    )
    batch: Count = Field(default=100, description="inputs of a draw: more steady the scores and take longer")
    epsilon: Positive = Field(
        default=0.01, description="size of the change that is scored; the ranking hardly depends on it"
    )
    cost: Literal["none", "flops"] = Field(
        default="none",
        description="flops: weights of convolutions, which work once a place, need higher scores: fewer FLOPs a pass",
    )
    cost_power: NotNegative = Field(
        default=0.2,
        description="cost flops: scores are divided by a weight's MACs to this power; more saves more and trains worse",
    )
    rescale: bool = Field(
        default=True,
        description="true scales what survives, so that the signal keeps its size, but no model.weights; false: paper",
    )

    @field_validator("cost")
    @classmethod
    def _scores_to_weigh(cls, value: str, info: ValidationInfo) -> str:
        if value != "none" and (pruner := info.data.get("pruner")) in ("grasp", "erk", "random"):
            why = "whose scores have signs" if pruner == "grasp" else "which has no scores to divide"
            raise rule(f'"none" with prune.pruner = "{pruner}", {why}')
        return value


class Train(Table):
    """The keys of [train]."""

    k: Count = Field(
        default=50, description="directions a device probes in a round: error falls as 1/k, forward passes grow with k"
    )
    sigma: float = Field(
        default=1e-4, ge=1e-8, le=1, description="length of a probe: long ones are biased, short ones drown in rounding"
    )
    direction: Literal["gaussian", "rademacher"] = Field(
        default="gaussian", description="gaussian is the paper's; rademacher costs far less to make"
    )
    seeds: Literal["per-device", "shared"] = Field(
        default="per-device",
        description="per-device: k directions for each device; shared: k in all, but a shorter update log",
    )
    spread: Count = Field(
        default=1,
        description='probe on 1/spread of the images: fewer passes, each noisier; 1: the paper; "auto" finds k too',
    )
    blocks: Count = Field(
        default=1,
        description="groups of layers with directions of their own, at most: passes go from there on; 1 is the paper",
    )
    bytes_up: Count = Field(
        default=256, description="spread auto: bytes of a reply; more hold more directions, and error falls with them"
    )
    passes: int = Field(
        default=51,
        ge=2,
        le=2**31,
        description="spread auto: forward passes an image, at most; more give each direction more images",
    )
    difference: Literal["forward", "central"] = Field(
        default="forward", description="forward: k + 1 passes; central: 2k passes, less bias"
    )
    local_steps: Count = Field(
        default=1,
        description="a device's own steps in a round: quicker at first, but devices drift apart and send more",
    )
    local_lr: Positive = Field(
        default=0.01, description="of local steps, if there are more than 1: larger learns quicker and drifts more"
    )
    bits: Literal[1, 2, 4, 8, 32] = Field(
        default=32,
        description="of a loss difference in a reply: fewer send less, and are noisier; 1 is its sign; 32 is the paper",
    )
    optimiser: Literal["sgd", "adam"] = Field(
        default="sgd",
        description="of the server: sgd is the paper's; adam adapts to each weight and keeps twice the state",
    )
    lr: Positive = Field(
        default=0.01,
        description="larger is quicker until noise wins; scale it with k x per_round / live weights, tune it by method",
    )
    momentum: float = Field(
        default=0.9,
        ge=0,
        lt=1,
        description="of sgd: averages noise out, but makes a step 1 / (1 - momentum) times larger",
    )
    weight_decay: NotNegative = Field(default=0.0, description="pulls weights to 0: less overfitting, slower fitting")
    lr_decay: float = Field(
        default=0.995,
        gt=0,
        le=1,
        description="lr's factor a round: 0.995 halves it every 138 rounds and calms the end (paper: 0.998); 1 = off",
    )
    schedule: Literal["decay", "cosine"] = Field(
        default="decay",
        description="how lr falls: by lr_decay, or as half a cosine, to 0 in the last round, whatever lr_decay is",
    )
    warmup: int = Field(
        default=0,
        ge=0,
        le=2**32 - 1,
        description="first rounds, in which lr climbs from lr / warmup to lr: bears a larger lr, loses a little time",
    )
    clip: NotNegative = Field(
        default=10.0,
        description="largest L2 norm of a round's estimate: tames bad rounds, but shortens good ones; 0 = off (paper)",
    )
    rate: Literal["fixed", "noise", "layers"] = Field(
        default="fixed",
        description="noise: lr times the share of signal in estimates; layers: by tensor, needs memory; fixed: just lr",
    )
    memory: bool = Field(
        default=False,
        description="the server remembers devices' last estimates: less noise of who was asked; devices fetch values",
    )
    memory_bytes: Count = Field(
        default=2**30,
        description="memory's largest file: more remember more devices, the longest unheard are forgotten",
    )
    nesterov: bool = Field(
        default=False,
        description="sgd looks ahead along its momentum: quicker without noise, noisier with it; needs memory",
    )
    restarts: bool = Field(
        default=False,
        description="sgd forgets its momentum where a round points against it: fewer swings, but noise does that too",
    )
    robust: Literal["none", "clip", "trim"] = Field(
        default="clip",
        description="against lying devices: clip bounds each one's part; trim drops ends of shared directions",
    )
    trim: float = Field(
        default=0.1,
        ge=0,
        lt=0.5,
        description="robust trim: share of devices dropped at either end; more is safer, noisier",
    )
    ema: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="decay of an averaged copy for tests: a smoother curve, twice the tests; 0 = off",
    )
    epochs: Count = Field(
        default=1, description="backpropagation: local epochs; more need fewer rounds, but devices drift apart"
    )
    batch: Count = Field(
        default=32,
        description="images a step (backpropagation, minibatches) or a BatchNorm batch: more need more memory",
    )

    @model_validator(mode="before")
    @classmethod
    def _found(cls, given: Any) -> Any:
        """Find k and spread, where they are left to the budgets."""
        if not isinstance(given, Mapping) or given.get("spread") != "auto":
            return given
        if "k" in given:
            raise rule('train.spread = "auto" finds train.k itself, expected only one of them; leave the other out')
        keys = ("bytes_up", "bits", "passes", "blocks")
        tables = {name: given.get(name, cls.model_fields[name].default) for name in keys}
        if not all(
            type(number) is int and number > 1 - (name in ("bits", "blocks")) for name, number in tables.items()
        ):
            return {**given, "spread": 1}  # one of them is refused for what it is
        k = presets.directions(tables["bytes_up"], tables["bits"], tables["blocks"])
        if not k:
            raise rule(
                f"train.bytes_up = {tables['bytes_up']} has no room for a difference, expected at least "
                f"{presets.fewest_bytes(tables['bits'], tables['blocks'])}"
            )
        return {**given, "k": k, "spread": presets.parts(k, tables["passes"], given.get("difference") == "central")}

    @field_validator("robust")
    @classmethod
    def _same_directions_to_trim(cls, value: str, info: ValidationInfo) -> str:
        if value == "trim" and info.data.get("seeds") == "per-device":
            raise rule('"trim" only with train.seeds = "shared", since it compares devices along the same directions')
        return value

    @field_validator("bits", mode="before")
    @classmethod
    def _an_integer(cls, value: Any) -> Any:
        # A choice of numbers takes what is equal to one of them, even where nothing else is converted.
        if type(value) is not int:
            raise rule("one of 1, 2, 4, 8, 32")
        return value

    @field_validator("bits")
    @classmethod
    def _differences_that_can_be_replayed(cls, value: int, info: ValidationInfo) -> int:
        if value < 32 and info.data.get("local_steps", 1) > 1:
            raise rule(
                "32: train.bits below 32 only with train.local_steps = 1, since the server replays a device's own "
                "steps from its exact differences"
            )
        return value

    @field_validator("local_steps")
    @classmethod
    def _steps_along_all_values(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("blocks", 1) > 1:
            raise rule("1 with train.blocks above 1: a device's own steps go along directions that perturb all values")
        return value

    @field_validator("memory")
    @classmethod
    def _estimates_to_remember(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("seeds") == "shared":
            raise rule('false with train.seeds = "shared", where devices have no estimates of their own to remember')
        return value

    @field_validator("memory")
    @classmethod
    def _rates_that_nobody_replays(cls, value: bool, info: ValidationInfo) -> bool:
        if not value and info.data.get("rate") == "layers":
            raise rule('true with train.rate = "layers", since devices that replay updates know one rate a round')
        return value

    @field_validator("restarts")
    @classmethod
    def _a_momentum_to_forget(cls, value: bool, info: ValidationInfo) -> bool:
        if value and not (info.data.get("momentum") and info.data.get("optimiser") == "sgd"):
            raise rule('false: true only with train.optimiser = "sgd" and a momentum')
        return value

    @field_validator("nesterov")
    @classmethod
    def _a_step_that_nobody_replays(cls, value: bool, info: ValidationInfo) -> bool:
        if value and not (
            info.data.get("memory") and info.data.get("momentum") and info.data.get("optimiser") == "sgd"
        ):
            raise rule(
                "false: true only with train.memory = true, since devices that replay updates know no such step, and "
                'with train.optimiser = "sgd" and a momentum'
            )
        return value

    @field_validator("spread")
    @classmethod
    def _a_direction_for_each_part(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("k", value):
            raise rule(f"at most train.k, which is {info.data['k']}")
        return value


class Fleet(Table):
    """The keys of [fleet]: how `foreseed serve` holds rounds. But for max_share they change nothing in a simulation."""

    sample: Literal["present", "all"] = Field(
        default="present",
        description="all: ask absent devices too and wait for them, so that the run is the simulator's to the bit",
    )
    deadline: NotNegative = Field(
        default=60.0, description="seconds for an answer: short drops slow devices, long waits for lost ones; 0 = none"
    )
    extra: int = Field(
        default=0, ge=0, le=2**16, description="devices asked beyond per_round: rounds close sooner, work is wasted"
    )
    min_replies: Count = Field(
        default=1, description="fewest replies that close a round at its deadline; more steady the round"
    )
    gather: NotNegative = Field(
        default=10.0, description="seconds to wait for per_round devices before a round starts with fewer"
    )
    rest_after: Count = Field(default=3, description="failures in a row after which a device is rested")
    rest_rounds: Count = Field(default=10, description="rounds that it rests")
    max_share: float = Field(
        default=0.3,
        gt=0,
        le=1,
        description="of a round's samples, for one device: less trusts claims less, and large shards; 1 = no limit",
    )
    replay_numbers: Count = Field(
        default=50_000_000,
        description="random numbers made to catch up, at most: more save bytes; a board makes a few million a second",
    )


def _listed(text: str) -> tuple[str, ...]:
    """Names with commas between them, each once."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


class Track(Table):
    """The keys of [track]: who is told of every round, beside metrics.jsonl. They change no bit of a run."""

    to: str = Field(
        default="",
        description="tensorboard, mlflow, wandb (several: with commas), or package.module:factory; each is an extra",
    )
    folder: str = Field(
        default="",
        description='where they write: one for several runs shows them side by side; "" = the run\'s own folder',
    )
    project: str = Field(
        default="foreseed", description="under which they group runs: MLflow's experiment, W&B's project"
    )

    @property
    def names(self) -> tuple[str, ...]:
        """The trackers asked for, each once."""
        return _listed(self.to)

    @field_validator("to")
    @classmethod
    def _known_trackers(cls, value: str) -> str:
        for name in _listed(value):
            if ":" not in name and name not in trackers():
                known = list(trackers())
                choices = f"one or several of {', '.join(known)}, package.module:factory"
                raise rule(f"{choices}, not {name!r}{did_you_mean(name, known)}")
        return value

    @field_validator("project")
    @classmethod
    def _a_name(cls, value: str) -> str:
        if not value.strip():
            raise rule("a name")
        return value


class Config(Table):
    """An experiment, checked and complete; it cannot be changed, only copied with changes by `with_`."""

    preset: Literal["", "paper", "best"] = Field(
        default="",
        description='what is not said comes from it: "paper", or "best", which learns most from few bytes and passes',
    )
    method: str = Field(
        default="ntk-baffle",
        description="ntk-baffle (pruned), baffle (dense): forward passes only; the others backpropagate",
    )
    seed: int = Field(
        default=0, ge=0, le=2**63 - 1, description="decides every random draw; one seed is a pointer, not a result"
    )
    rounds: Count = Field(default=300, description="more learn more, until lr_decay leaves nothing to learn with")
    eval_every: Count = Field(
        default=10, description="rounds from test to test: small draws a fine curve, large saves time"
    )
    workers: int = Field(
        default=0, ge=0, le=2**16, description="threads, 0 = one a core; the result is the same for any number"
    )
    engine: Literal["difference", "exact"] = Field(
        default="difference",
        description="difference: what a device does; exact: its limit by autograd, tens of times quicker",
    )
    name: str = Field(default="", description='folder of the results under runs/; "" = the method')
    data: Data = Field(default=Data(), description="what is learnt, and who holds which part of it")
    model: Model = Field(default=Model(), description="what is trained")
    prune: Prune = Field(
        default=Prune(), description="which weights live, decided before training; baffle and fedavg keep all"
    )
    train: Train = Field(default=Train(), description="how a round learns")
    fleet: Fleet = Field(default=Fleet(), description="how a real fleet's rounds are held")
    track: Track = Field(default=Track(), description="who else is told of every round")

    @property
    def is_bp(self) -> bool:
        """Whether devices backpropagate."""
        return methods()[self.method].backpropagates

    @property
    def effective_density(self) -> float:
        """The share of weights that live; the dense methods keep all, whatever [prune] says."""
        return self.prune.density if methods()[self.method].prunes else 1.0

    @property
    def is_pruned(self) -> bool:
        """Whether there is a mask."""
        return self.effective_density < 1

    @property
    def run_name(self) -> str:
        """The name of the results' folder."""
        return self.name or self.method

    def own(self, settings: type[T]) -> T:
        """A method's own table, by its type."""
        return next(value for value in vars(self).values() if isinstance(value, settings))

    def with_(self, overrides: Mapping[str, Any]) -> Config:
        """A copy with other values, by dotted key, checked like a file: `config.with_({"train.k": 100})`."""
        tables = self.model_dump()
        for key, value in overrides.items():
            merge(tables, nested(key, value))
        return Config.model_validate(tables)

    def to_toml(self) -> str:
        """The file of this config, every key with its trade-off; it loads back to an equal config."""
        return toml.document(self)

    @field_validator("method")
    @classmethod
    def _known_method(cls, value: str) -> str:
        if value not in methods():
            raise rule(f"one of {', '.join(methods())}{did_you_mean(value, list(methods()))}")
        return value

    @field_validator("name")
    @classmethod
    def _a_folder_name(cls, value: str) -> str:
        if not re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]{0,99})?", value):
            raise rule(
                "a folder's name: at most 100 letters, digits, dots, dashes and underscores, no dot or dash first"
            )
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _explained(cls, given: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        try:
            return handler(presets.completed(given) if isinstance(given, Mapping) else given)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False)
            raise ConfigError(explain(cls, problems, info.context or {})) from None


def nested(key: str, value: Any) -> dict[str, Any]:
    """The tables that give one dotted key a value."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return dict(value)


def merge(tables: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Write what was given over the tables, key by key."""
    for name, value in given.items():
        if isinstance(value, dict) and isinstance(tables.get(name), dict):
            tables[name] |= value
        else:
            tables[name] = value


def enter(method: Method) -> Method:
    """Make a method known, with its own table [name] if it has settings; a second one of its name is a mistake."""
    if method.name in entered:
        raise ConfigError(f"method {method.name!r} is entered twice; give one of the two another name")
    entered[method.name] = method
    if method.settings is not None:
        field = Field(default=method.settings(), description=f"of method {method.name} alone")
        Config.__pydantic_fields__[method.name] = FieldInfo.from_annotated_attribute(method.settings, field)
        Config.model_rebuild(force=True)
    return method


def withdraw(name: str) -> None:
    """Forget a method again."""
    if entered.pop(name).settings is not None:
        del Config.__pydantic_fields__[name]
        Config.model_rebuild(force=True)
