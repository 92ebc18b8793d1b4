"""The options of the char_gpt example: `train.options` of a job's config, checked."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar, get_args, get_type_hints


class OptionsError(ValueError):
    """An option is unknown or impossible. One line for the user."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Sizes of the transformer. `width` is a multiple of 2 * `heads`; `context` is in bytes."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 64
    dropout: float = 0.1


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The text: files and folders, up to `max_bytes`; without any, the running Python's standard library."""

    paths: list[str] = field(default_factory=list)
    max_bytes: int = 16 << 20
    validation_fraction: float = 0.05


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How the ranks share the work: the product of the four sizes is the number of ranks.

    `dp`: replicas, 0 for as many as the ranks give; `shard`: parts that FSDP2 cuts parameters and optimizer
    state in; `tp`: ranks that share each layer; `pp`: stages of a 1F1B pipeline, each of which sees
    `micro_batches` of a batch, 0 for one a stage.
    """

    dp: int = 0
    shard: int = 1
    tp: int = 1
    pp: int = 1
    micro_batches: int = 0

    def of(self, ranks: int) -> ParallelOptions:
        """The layout of so many ranks, with nothing left open. Raises OptionsError if there is none."""
        each = self.shard * self.tp * self.pp
        dp = self.dp or max(ranks // each, 1)
        if dp * each != ranks:
            raise OptionsError(
                f"train.options.parallel: dp {dp} * shard {self.shard} * tp {self.tp} * pp {self.pp} is "
                f"{dp * each}, but the number of ranks (job.nodes * job.ranks_per_node) is {ranks}"
            )
        return replace(self, dp=dp, micro_batches=self.micro_batches or self.pp)

    @property
    def divides(self) -> bool:
        """Whether no rank alone has the whole model."""
        return self.shard * self.tp * self.pp > 1


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything that can be set. `batch_size` is in sequences a rank (of a pipeline: a stage); `eval_every`
    in steps, 0 for never. `compile`: blocks by Inductor, with `dynamic_shapes` for batches of any size."""

    model: ModelOptions = field(default_factory=ModelOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    compile: bool = False
    dynamic_shapes: bool = False
    data: DataOptions = field(default_factory=DataOptions)
    batch_size: int = 8
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    eval_every: int = 50
    eval_batches: int = 4
    seed: int = 1234


_Dataclass = TypeVar("_Dataclass")


def read_options(given: Mapping[str, Any]) -> Options:
    """The options in a config's free-form part; what is not given has its default. Raises OptionsError."""
    options = _read(Options, given, "train.options")
    model = options.model
    for name, value, least in (
        ("model.layers", model.layers, 1),
        ("model.heads", model.heads, 1),
        ("model.width", model.width, 1),
        ("model.context", model.context, 1),
        ("parallel.dp", options.parallel.dp, 0),
        ("parallel.shard", options.parallel.shard, 1),
        ("parallel.tp", options.parallel.tp, 1),
        ("parallel.pp", options.parallel.pp, 1),
        ("parallel.micro_batches", options.parallel.micro_batches, 0),
        ("data.max_bytes", options.data.max_bytes, 1),
        ("batch_size", options.batch_size, 1),
        ("warmup_steps", options.warmup_steps, 0),
        ("weight_decay", options.weight_decay, 0),
        ("eval_every", options.eval_every, 0),
        ("eval_batches", options.eval_batches, 1),
        ("seed", options.seed, 0),
    ):
        if value < least:
            raise OptionsError(f"train.options.{name}: at least {least} was expected, found {value}")
    if model.width % (2 * model.heads):
        raise OptionsError(
            f"train.options.model.width: a multiple of twice the {model.heads} heads was expected, "
            f"found {model.width}"
        )
    if not 0 <= model.dropout < 1:
        raise OptionsError(f"train.options.model.dropout: at least 0 and below 1, found {model.dropout}")
    if not 0 < options.data.validation_fraction < 1:
        found = options.data.validation_fraction
        raise OptionsError(
            f"train.options.data.validation_fraction: between 0 and 1 was expected, found {found}"
        )
    for name, positive in (("learning_rate", options.learning_rate), ("clip_norm", options.clip_norm)):
        if not positive > 0:
            raise OptionsError(f"train.options.{name}: more than 0 was expected, found {positive}")
    _check_parts(options)
    return options


def check(given: Mapping[str, Any], ranks: int) -> None:
    """Raises OptionsError when the example cannot run with these options on so many ranks."""
    read_options(given).parallel.of(ranks)


def _check_parts(options: Options) -> None:
    """That the model and the batch can be cut as the layout wants it."""
    model, parallel = options.model, options.parallel
    micro_batches = parallel.micro_batches or parallel.pp
    for name, parts, what, whole in (
        ("tp", parallel.tp, "heads", model.heads),
        ("pp", parallel.pp, "layers", model.layers),
        ("micro_batches", micro_batches, "sequences of a batch", options.batch_size),
    ):
        if whole % parts:
            raise OptionsError(
                f"train.options.parallel.{name}: the {whole} {what} cannot be shared out evenly by {parts}"
            )
    if micro_batches < parallel.pp:
        raise OptionsError(
            f"train.options.parallel.micro_batches: at least one for each of the {parallel.pp} stages was "
            f"expected, found {micro_batches}"
        )
    if parallel.pp == 1 and parallel.micro_batches > 1:
        raise OptionsError(
            f"train.options.parallel.micro_batches: {parallel.micro_batches} of them need a pipeline; set "
            "parallel.pp or leave it out"
        )
    if options.dynamic_shapes and not options.compile:
        raise OptionsError("train.options.dynamic_shapes: only with compile: true")


def _read(kind: type[_Dataclass], given: object, where: str) -> _Dataclass:
    if not isinstance(given, Mapping):
        raise OptionsError(f"{where}: options by name were expected, found {given!r}")
    known = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    values = {}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise OptionsError(f"{where}.{name}: unknown option; {hint}")
        values[name] = _value(hints[name], value, f"{where}.{name}")
    return kind(**values)


def _value(kind: Any, value: object, where: str) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        return _read(kind, {} if value is None else value, where)
    if isinstance(kind, types.GenericAlias):
        (item,) = get_args(kind)
        if isinstance(value, list) and all(type(each) is item for each in value):
            return value
        raise OptionsError(f"{where}: a list of {item.__name__} was expected, found {value!r}")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise OptionsError(f"{where}: {kind.__name__} was expected, found {value!r}")
    return value
