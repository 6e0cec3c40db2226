"""`legato run`: one prompt, one answer, made for pipes."""

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

import click

from legato.chat.interrupt import InterruptGuard
from legato.chat.view import AnswerWriter, Notices, WaitNote, stats_line
from legato.cli.errors import INTERRUPTED
from legato.cli.opening import note_missing_template, open_model
from legato.cli.options import CommonOptions, SectionCommand, argument_text, common_options, take_common
from legato.cli.stdin import read_stdin
from legato.core.events import FinishReason

if TYPE_CHECKING:  # `open_model` imports it, while the model is being loaded
    from legato.api import LLM, Answer, Choice, Stream

_NOTE_AFTER_S = 2.0
_NO_PROMPT = 'there is no prompt; give one, as in: legato run "Why is the sky blue?", or pipe text in'


@dataclasses.dataclass(frozen=True, slots=True)
class OutputOptions:
    """What leaves, besides the answer."""

    as_json: bool = False
    stats: bool = False
    is_raw: bool = False


@click.command(
    cls=SectionCommand,
    epilog="""\b
Examples:
  legato run "Why is the sky blue?"
  git diff | legato run "Write a commit message for this change."
  legato run --temperature 0 --max-tokens 50 "List three colours." > colours.txt
  legato run --json --seed 7 -n 3 "Name a cat."
  legato run --raw "Once upon a time"
""",
)
@click.argument("prompt", required=False)
@click.option("--raw", "is_raw", is_flag=True, help="Continue the text as it is, without the model's chat template.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object, when the answer is complete.")
@click.option("--stats", is_flag=True, help="Say on stderr how long it took and how many tokens it was.")
@click.option(
    "--stdin/--no-stdin",
    "wanted_stdin",
    default=None,
    help="Read stdin to its end, or not at all. Unset: read it, but do not wait long for an open pipe that is empty.",
)
@common_options(chat=False)
def run(prompt: str | None, is_raw: bool, as_json: bool, stats: bool, wanted_stdin: bool | None, **values: Any) -> None:
    """Answer PROMPT. Only the answer goes to stdout.

    Text from stdin comes after PROMPT, with an empty line between; without PROMPT it is the prompt.
    """
    options = take_common(values)
    output = OutputOptions(as_json, stats, is_raw)
    _check_fit(options, output)
    text = join_prompt(prompt, read_stdin(has_prompt=bool(prompt), wanted=wanted_stdin), is_raw=is_raw)
    if answer_once(text, options, output):
        sys.exit(INTERRUPTED)


def join_prompt(prompt: str | None, piped: str, *, is_raw: bool = False) -> str:
    """The argument, an empty line, and what came by stdin, without its last line's end; raw text keeps that.

    Raises UsageError when there is neither, RequestError for bytes in the argument that are no text.
    """
    if not is_raw:
        piped = piped.removesuffix("\n").removesuffix("\r")
    prompt = argument_text(prompt, "PROMPT") if prompt else None
    text = "\n\n".join(part for part in (prompt, piped) if part and not part.isspace())
    if not text:
        raise click.UsageError(_NO_PROMPT, click.get_current_context(silent=True))
    return text


def answer_once(text: str, options: CommonOptions, output: OutputOptions) -> bool:
    """Open the model, answer, close it. → whether Ctrl-C ended it."""
    writer = AnswerWriter()
    with open_model(options) as llm, InterruptGuard(kill_on_second=True) as guard, guard.answering():
        if not output.is_raw:
            note_missing_template(llm)
        note = WaitNote("reading the prompt …", _NOTE_AFTER_S)
        try:
            with _start(llm, text, options, output) as stream:
                guard.attach(stream.cancel)
                answer = _follow(stream, note, None if output.as_json else writer)
        finally:
            note.clear()
        _finish(answer, writer, output)
        _warn_when_full(answer, llm)
        return guard.was_hit


def _start(llm: "LLM", text: str, options: CommonOptions, output: OutputOptions) -> "Stream":
    if output.is_raw:
        return llm.stream_completion(text, **options.generation)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    return llm.stream([*messages, {"role": "user", "content": text}], **options.generation)


def _follow(stream: "Stream", note: WaitNote, writer: AnswerWriter | None) -> "Answer":
    """Read to the end, writing what comes if there is a writer."""

    def show(text: str) -> None:
        note.clear()
        if writer is not None:
            writer.write(text)

    try:
        return stream.answer(on_delta=show)
    finally:
        note.clear()
        if writer is not None:
            writer.end()


def _finish(answer: "Answer", writer: AnswerWriter, output: OutputOptions) -> None:
    if output.as_json:
        writer.write(json.dumps(as_json_value(answer), ensure_ascii=False) + "\n")
    if output.stats:
        line = stats_line(answer.usage, answer.timing, answer.finish_reason)
        Notices().dim(f"{line} · seed {answer.seed}")


def as_json_value(answer: "Answer") -> dict[str, Any]:
    """What --json writes. With several answers each is an entry of `choices`; times are in seconds."""
    head = {"model": answer.model, "seed": answer.seed}
    if len(answer.choices) == 1:
        return head | _choice_value(answer.choices[0])
    return head | {"choices": [_choice_value(choice) for choice in answer.choices]}


def _choice_value(choice: "Choice") -> dict[str, Any]:
    value: dict[str, Any] = {
        "text": choice.text,
        "finish_reason": choice.finish_reason.value,
        "stop_sequence": choice.stop_sequence,
        "usage": dataclasses.asdict(choice.usage) | {"total_tokens": choice.usage.total_tokens},
        "timing": dataclasses.asdict(choice.timing) | {"tokens_per_s": choice.timing.tokens_per_s},
    }
    if choice.logprobs:
        value["logprobs"] = [
            _logprob_value(entry.chosen) | {"top": [_logprob_value(other) for other in entry.top]}
            for entry in choice.logprobs
        ]
    return value


def _logprob_value(entry: Any) -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "text": entry.text,
        "bytes": list(entry.raw),
        "logprob": entry.logprob,
    }


def _warn_when_full(answer: "Answer", llm: "LLM") -> None:
    """A full context cuts the answer without being asked to: that must not pass in silence."""
    if answer.finish_reason is FinishReason.LENGTH and answer.usage.total_tokens >= llm.context_length:
        Notices().say(
            f"warning: the answer was cut, the context of {llm.context_length} tokens is full; --context takes more"
        )


def _check_fit(options: CommonOptions, output: OutputOptions) -> None:
    """Raises UsageError for options that contradict one another."""
    context = click.get_current_context(silent=True)
    if not output.as_json:
        for name, flag in (("logprobs", "--logprobs"), ("n", "-n")):
            if options.generation.get(name) not in (None, 1) or (name == "logprobs" and name in options.generation):
                raise click.UsageError(f"{flag} needs --json; a stream of plain text cannot carry it", context)
    if output.is_raw and options.system:
        raise click.UsageError("--raw takes no --system: raw text has no roles; put it into the prompt", context)
