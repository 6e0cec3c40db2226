"""What was asked for: frozen values, checked when they are made.

Every option is declared once, here, with its range and its help text. The Python API, the command line and the
protocols read these declarations; none of them has a list of its own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from legato.core.errors import RequestError
from legato.core.messages import Message

SAMPLER_ORDER = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typical_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)

_LEAST_TEMPERATURE = 0.001  # below it logits overflow, and the likeliest token wins anyway
_MOST_BIAS = 10_000.0
# These are compared with every token; hundreds would make the neighbours wait.
_MOST_BREAKERS = 16
_MOST_STOPS = 64


def _option(default: Any, text: str, low: float = -math.inf, high: float = math.inf, above: float = -math.inf) -> Any:
    """A dataclass field with its range: low ≤ value ≤ high, and value > above."""
    bounds = {"help": text, "low": low, "high": high, "above": above}
    if callable(default):
        return field(default_factory=default, metadata=bounds)
    return field(default=default, metadata=bounds)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn from the logits. Defaults are libllama's.

    Order: logit_bias first, then the stages of `samplers`, then the draw. With temperature 0 the draw is the argmax
    after bias, penalties and DRY. Mirostat replaces every stage after penalties and DRY but temperature.
    """

    temperature: float = _option(0.8, "0 takes the likeliest token always; higher is more varied", 0, 100)
    dynatemp_range: float = _option(0.0, "temperature moves by this much with the entropy; 0 = off", 0, 100)
    dynatemp_exponent: float = _option(1.0, "how entropy maps to temperature", 0, 100)
    top_k: int = _option(40, "keep the k likeliest tokens; 0 = off", 0, 2**31 - 1)
    top_p: float = _option(0.95, "keep the likeliest tokens up to this share of probability; 1 = off", 0, 1)
    min_p: float = _option(0.05, "drop tokens below this share of the best one's probability; 0 = off", 0, 1)
    typical_p: float = _option(1.0, "locally typical sampling; 1 = off", 0, 1)
    top_n_sigma: float = _option(0.0, "keep logits within n standard deviations of the best; 0 = off", 0, 1000)
    xtc_probability: float = _option(0.0, "chance to exclude the top choices at a step; 0 = off", 0, 1)
    xtc_threshold: float = _option(0.1, "XTC excludes tokens above this probability but the last", 0, 1)
    dry_multiplier: float = _option(0.0, "strength of the DRY repetition penalty; 0 = off", 0, 1000)
    dry_base: float = _option(1.75, "growth of the DRY penalty with the length of the repetition", 1, 1000)
    dry_allowed_length: int = _option(2, "repetitions up to this length are free of DRY", 0, 2**31 - 1)
    dry_last_n: int | None = _option(None, "tokens DRY looks back over; unset = the whole context", 0, 2**31 - 1)
    dry_breakers: tuple[str, ...] = _option(("\n", ":", '"', "*"), "strings across which DRY sees no repetition")
    mirostat: int = _option(0, "0 = off, 1 = Mirostat, 2 = Mirostat 2.0", 0, 2)
    mirostat_tau: float = _option(5.0, "Mirostat's target surprise", 0, 1000)
    mirostat_eta: float = _option(0.1, "Mirostat's learning rate", 0, 1)
    repeat_penalty: float = _option(1.0, "divide the logits of recent tokens by this; 1 = off", 0.01, 1000)
    frequency_penalty: float = _option(0.0, "subtract this times a token's recent count", -100, 100)
    presence_penalty: float = _option(0.0, "subtract this from every recent token", -100, 100)
    repeat_last_n: int = _option(64, "tokens that the three penalties look back over; 0 = off", 0, 2**31 - 1)
    logit_bias: Mapping[int, float] = _option(dict, "token id → number added to its logit")
    seed: int | None = _option(None, "same seed, same text; unset = a random one, which is reported", 0, 2**32 - 2)
    samplers: tuple[str, ...] = _option(SAMPLER_ORDER, "order of the stages; a stage left out is off")

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_strings(self, "dry_breakers")
        _check_strings(self, "samplers")
        for name in self.samplers:
            if name not in SAMPLER_ORDER:
                raise RequestError(
                    f"samplers has {name!r}; the stages are: {', '.join(SAMPLER_ORDER)}", field="samplers"
                )
        if len(set(self.samplers)) != len(self.samplers):
            raise RequestError("samplers names a stage twice", field="samplers")
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            raise RequestError(
                f"temperature must be 0 (the likeliest token always) or at least {_LEAST_TEMPERATURE}, "
                f"not {self.temperature!r}",
                field="temperature",
            )
        if len(self.dry_breakers) > _MOST_BREAKERS:
            raise RequestError(
                f"dry_breakers has {len(self.dry_breakers)} strings; the most is {_MOST_BREAKERS}", field="dry_breakers"
            )
        _check_logit_bias(self.logit_bias)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # the caller keeps no hand on it


@dataclass(frozen=True, slots=True)
class Limits:
    """When a generation ends. Stop strings look at visible text; what matched is never sent."""

    max_tokens: int | None = _option(
        None, "end after this many tokens; unset = to the end of the context", 1, 2**31 - 1
    )
    min_tokens: int = _option(0, "the model may not end before this many tokens", 0, 2**31 - 1)
    max_time_s: float | None = _option(None, "end after this many seconds", high=1e9, above=0)
    stop: tuple[str, ...] = _option((), "end before this string; can be given more than once")
    stop_token_ids: tuple[int, ...] = _option((), "end at this token id; can be given more than once")
    ignore_eos: bool = _option(False, "never let the model end its turn; a limit must")

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_strings(self, "stop")
        if len(self.stop) > _MOST_STOPS:
            raise RequestError(f"stop has {len(self.stop)} strings; the most is {_MOST_STOPS}", field="stop")
        if "" in self.stop:
            raise RequestError("stop has an empty string; leave it out", field="stop")
        if not isinstance(self.stop_token_ids, tuple) or any(
            type(token) is not int or token < 0 for token in self.stop_token_ids
        ):
            raise RequestError("stop_token_ids must be token ids, whole numbers from 0", field="stop_token_ids")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError("ignore_eos must be true or false", field="ignore_eos")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})",
                field="min_tokens",
            )


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """All options of one request. `logprobs`: how many alternatives to report per token; None = no logprobs."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    limits: Limits = field(default_factory=Limits)
    priority: int = _option(0, "lower goes first: into a slot, and while prompts are read", -1000, 1000)
    cache_salt: str = _option("", "requests with different salts never share what was read of their prompts")
    n: int = _option(1, "how many answers to draw, each with a seed of its own", 1, 128)
    logprobs: int | None = _option(None, "report log probabilities, with this many alternatives per token", 0, 100)

    def __post_init__(self) -> None:
        _check_numbers(self)
        if not isinstance(self.cache_salt, str):
            raise RequestError("cache_salt must be a string", field="cache_salt")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Answer a conversation, rendered by the model's chat template."""

    messages: tuple[Message, ...]
    options: GenerationOptions = field(default_factory=GenerationOptions)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Continue a text, or token ids, as they are: no template."""

    prompt: str | tuple[int, ...]
    options: GenerationOptions = field(default_factory=GenerationOptions)


Request = ChatRequest | CompletionRequest

_SAMPLING = {f.name for f in fields(SamplingParams)}
_LIMITS = {f.name for f in fields(Limits)}
_REST = {f.name for f in fields(GenerationOptions)} - {"sampling", "limits"}
OPTION_NAMES = _SAMPLING | _LIMITS | _REST


def make_options(given: Mapping[str, object]) -> GenerationOptions:
    """Options from a flat mapping of names to values. Lists become tuples; one stop string may come bare.

    Raises RequestError, naming the field, for an unknown name or a value out of range.
    """
    for name in given:
        if name not in OPTION_NAMES:
            near = get_close_matches(name, OPTION_NAMES, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RequestError(f"unknown option {name!r}{hint}", field=name)
    values = {name: _as_value(name, value) for name, value in given.items()}
    return GenerationOptions(
        sampling=SamplingParams(**{k: v for k, v in values.items() if k in _SAMPLING}),
        limits=Limits(**{k: v for k, v in values.items() if k in _LIMITS}),
        **{k: v for k, v in values.items() if k in _REST},
    )


def _as_value(name: str, value: object) -> Any:
    if name == "stop" and isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _check_numbers(params: Any) -> None:
    """Range and kind of every number field, by its declaration."""
    for f in fields(params):
        kinds = str(f.type)
        if ("int" not in kinds and "float" not in kinds) or "tuple" in kinds or "Mapping" in kinds:
            continue
        value = getattr(params, f.name)
        if value is None and "None" in kinds:
            continue
        whole = "float" not in kinds
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            kind = "a whole number" if whole else "a number"
            raise RequestError(f"{f.name} must be {kind}, not {value!r}", field=f.name)
        low, high, above = f.metadata["low"], f.metadata["high"], f.metadata["above"]
        if not (low <= value <= high and value > above and math.isfinite(value)):
            least = f"above {above:g}" if above > -math.inf else f"from {low:g}"
            raise RequestError(f"{f.name} must be {least} to {high:g}, not {value!r}", field=f.name)


def _check_strings(params: Any, name: str) -> None:
    value = getattr(params, name)
    if not isinstance(value, tuple) or any(not isinstance(item, str) for item in value):
        raise RequestError(f"{name} must be a list of strings", field=name)
    for item in value:
        try:
            item.encode()
        except UnicodeEncodeError:
            raise RequestError(f"{name} has {item!r}, which is not valid Unicode", field=name) from None


def _check_logit_bias(bias: object) -> None:
    if not isinstance(bias, Mapping):
        raise RequestError("logit_bias must map token ids to numbers", field="logit_bias")
    for token, value in bias.items():
        if type(token) is not int or token < 0:
            raise RequestError(f"logit_bias has {token!r}; its keys are token ids", field="logit_bias")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (value == -math.inf or -_MOST_BIAS <= value <= _MOST_BIAS):
            raise RequestError(
                f"logit_bias[{token}] must be -inf or from {-_MOST_BIAS:g} to {_MOST_BIAS:g}, not {value!r}",
                field="logit_bias",
            )
