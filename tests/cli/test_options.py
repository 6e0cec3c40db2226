from dataclasses import fields
from typing import Any

import click
import pytest

from legato.cli.main import main
from legato.cli.options import CommonOptions, common_options, take_common
from legato.core.request import GenerationOptions, Limits, SamplingParams, make_options

ONLY_SHARED = {"priority", "cache_salt"}  # of no use to a command that has the engine to itself
EVERY_FIELD = [f for params in (SamplingParams, Limits, GenerationOptions) for f in fields(params) if f.metadata]
DECLARED = [f for f in EVERY_FIELD if f.name not in ONLY_SHARED]


def parse(*args: str, chat: bool = False) -> CommonOptions:
    """What a command with the common options gets."""
    taken: list[CommonOptions] = []

    @click.command()
    @common_options(chat=chat)
    def command(**values: Any) -> None:
        taken.append(take_common(values))

    command.main(list(args), standalone_mode=False)
    return taken[0]


def flag_of(name: str, command: click.Command) -> str:
    return next(param.opts[0] for param in command.params if param.name == name)


@click.command()
@common_options(chat=False)
def everything(**values: Any) -> None: ...


@pytest.mark.parametrize("declared", DECLARED, ids=lambda f: f.name)
def test_every_declared_option_has_a_flag_and_its_help_text(declared: Any) -> None:
    option = next(param for param in everything.params if param.name == declared.name)
    assert isinstance(option, click.Option) and option.help is not None
    assert declared.metadata["help"][1:] in option.help


def test_no_flag_is_made_for_what_is_not_declared() -> None:
    known = {f.name for f in DECLARED} | {"context", "threads", "flash_attention", "kv_type", "gpu_layers"}
    assert {param.name for param in everything.params} == known | {"model", "system"}


def test_nothing_given_is_nothing_passed_on() -> None:
    taken = parse()
    assert taken == CommonOptions("smollm2", None, {"slots": 1}, {})


def test_values_arrive_as_the_declarations_want_them() -> None:
    taken = parse(
        *("--temperature", "0.5", "--top-k", "3", "--stop", "a", "--stop", "b,c", "--stop-token-ids", "7"),
        *("--logit-bias", "42=-inf", "--logit-bias", "7=1.5", "--samplers", "top_k, temperature", "--ignore-eos"),
        *("--max-time", "2.5", "--seed", "9", "-n", "2", "--context", "512", "--kv-type", "q8_0", "--threads", "1"),
    )
    options = make_options(taken.generation)
    assert options.sampling == SamplingParams(
        temperature=0.5,
        top_k=3,
        seed=9,
        logit_bias={42: -float("inf"), 7: 1.5},
        samplers=("top_k", "temperature"),
    )
    assert options.limits == Limits(stop=("a", "b,c"), stop_token_ids=(7,), ignore_eos=True, max_time_s=2.5)
    assert options.n == 2
    assert taken.engine == {"slots": 1, "context": 512, "kv_type": "q8_0", "threads": 1}


def test_zero_is_a_value() -> None:
    assert parse("--temperature", "0", "--top-k", "0").generation == {"temperature": 0.0, "top_k": 0}


def test_chat_has_no_flags_for_several_answers() -> None:
    with pytest.raises(click.NoSuchOption):
        parse("-n", "2", chat=True)
    with pytest.raises(click.NoSuchOption):
        parse("--logprobs", "2", chat=True)


def test_model_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGATO_MODEL", "other")
    assert (parse().model, parse("-m", "mine").model) == ("other", "mine")


BAD_VALUES = [
    ("--temperature", "-1"),
    ("--temperature", "1e9"),
    ("--temperature", "nan"),
    ("--temperature", "inf"),
    ("--temperature", "warm"),
    ("--top-p", "-1"),
    ("--top-p", "1.01"),
    ("--top-k", "-1"),
    ("--top-k", "2.5"),
    ("--repeat-penalty", "0"),
    ("--repeat-penalty", "nan"),
    ("--max-tokens", "0"),
    ("--max-tokens", "-1"),
    ("--max-tokens", "99999999999999999999"),
    ("--max-time", "0"),
    ("--seed", "-1"),
    ("--seed", "4294967296"),
    ("--mirostat", "3"),
    ("-n", "0"),
    ("--stop", ""),
    ("--stop-token-ids", "-1"),
    ("--logit-bias", "42"),
    ("--logit-bias", "x=1"),
    ("--logit-bias", "42=nan"),
    ("--logit-bias", "42=inf"),
    ("--samplers", "top_k,magic"),
    ("--samplers", "top_k,top_k"),
    ("--samplers", ""),
    ("--context", "0"),
    ("--context", "1e3"),
    ("--threads", "0"),
    ("--kv-type", "q3"),
    ("--flash-attention", "maybe"),
    ("--gpu-layers", "-2"),
]


@pytest.mark.parametrize("command", ["run", "chat"])
@pytest.mark.parametrize(("flag", "value"), BAD_VALUES)
def test_b62_a_bad_value_ends_with_2_and_names_its_flag(
    command: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # The model does not exist: the value must be refused before anyone looks for it.
    assert main([command, "-m", "no-such-model", flag, value]) == 2
    out, err = capsys.readouterr()
    assert out == "" and flag in err and "--help" in err
    assert "no-such-model" not in err


def every_flag() -> list[str]:
    return [flag_of(f.name, everything) for f in DECLARED if f.type in (int, float, int | None, float | None)]


@pytest.mark.parametrize("flag", every_flag())
def test_b62_no_number_takes_nan(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-m", "no-such-model", flag, "nan", "hi"]) == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--min-tokens", "5", "--max-tokens", "4"], "min_tokens (5) is larger than max_tokens (4)"),
        (["--kv-type", "q8_0", "--flash-attention", "off"], "kv_type q8_0 needs flash_attention on or auto"),
        (["-n", "2"], "-n needs --json"),
        (["--logprobs", "1"], "--logprobs needs --json"),
        (["--raw", "--system", "x"], "--raw takes no --system"),
    ],
)
def test_values_that_contradict_one_another(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-m", "no-such-model", *args, "hi"]) == 2
    assert said in capsys.readouterr().err
