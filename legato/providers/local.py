"""The engine on this machine: a model file in, events out."""

import itertools
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Self

from legato.core.errors import ContextLengthError, RequestError
from legato.core.events import Finished, Started, StreamEvent, TextDelta
from legato.core.messages import Message
from legato.core.request import ChatRequest, Request
from legato.engine.config import EngineConfig
from legato.engine.engine import Engine
from legato.engine.loader import load_model
from legato.engine.mailbox import Mailbox
from legato.engine.sampler import Sampler
from legato.engine.sequence import Sequence as EngineSequence
from legato.engine.sequence import SequenceClock, SequenceOutput
from legato.engine.worker import EngineWorker
from legato.llama.context import LlamaContext
from legato.llama.model import LlamaModel, Progress
from legato.llama.samplers import SamplerSpace
from legato.text.detokenizer import Detokenizer
from legato.text.stops import StopStrings
from legato.text.template import ChatTemplate, split_control

_SEEDS = 2**32 - 1  # libllama reads 2**32 - 1 as "random"


class LocalStream:
    """One running request. Iterate it once, blocking or async; `cancel` from any thread."""

    def __init__(self, mailbox: Mailbox, worker: EngineWorker, started: Started, num_choices: int) -> None:
        self.started = started
        self.num_choices = num_choices
        self._mailbox = mailbox
        self._worker = worker

    def __iter__(self) -> Iterator[StreamEvent]:
        yield self.started
        while outputs := self._mailbox.get():
            yield from _events(outputs)

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        yield self.started
        while outputs := await self._mailbox.get_async():
            for event in _events(outputs):
                yield event

    def cancel(self) -> None:
        """Stop between two steps; the stream then ends with reason `cancelled`. Harmless when it has ended."""
        if not self._mailbox.is_done:
            self._worker.cancel(self._mailbox.request_id)


class LocalProvider:
    """A loaded model and its engine. Thread-safe: any number of requests may run at once."""

    def __init__(self, name: str, model: LlamaModel, context: LlamaContext, config: EngineConfig) -> None:
        """Use `open`. `context` is handed over to the engine's thread."""
        self.model_name = name
        self.context_length = context.context_length
        self.num_slots = context.num_slots
        self.vocab = model.vocab
        vocab = self.vocab
        self.template = ChatTemplate(
            model.chat_template,
            bos_token=vocab.token_text(vocab.bos_id),
            eos_token=vocab.token_text(vocab.eos_id),
            control_tokens=tuple(vocab.control_tokens),
        )
        self._space = SamplerSpace(context.vocab_size, context.context_length, vocab)
        self._worker = EngineWorker(Engine(context, vocab, config), config, context.num_slots, context.close)
        self._ids = itertools.count(1)
        self._run = secrets.token_hex(4)

    @classmethod
    def open(
        cls, name: str, path: Path, config: EngineConfig | None = None, on_progress: Progress | None = None
    ) -> Self:
        """Check the file and the memory, load, and start the engine.

        Raises ModelFileError, InsufficientMemoryError, ConfigError or EngineLibraryError. on_progress gets the share
        that is loaded, 0 to 1.
        """
        config = config or EngineConfig()
        model, params = load_model(path, config, on_progress)
        return cls(name, model, LlamaContext(model, params), config)

    def prompt_ids(self, request: Request) -> list[int]:
        """The prompt's token ids: a chat by its template, whose message text cannot become a control token.

        Raises RequestError (TemplateError among them).
        """
        if isinstance(request, ChatRequest):
            return self._chat_ids(request.messages)
        if isinstance(request.prompt, str):
            return self.vocab.tokenize(request.prompt, add_special=True)
        self.vocab.check_ids(request.prompt, "prompt")
        return list(request.prompt)

    def stream(self, request: Request) -> LocalStream:
        """Start a request: tokenizes here, on the caller's thread, then never blocks.

        Raises RequestError for what can be known now (ContextLengthError with both numbers among it), EngineError when
        the engine is dead or closed.
        """
        options = request.options
        received = time.monotonic()
        self.vocab.check_ids(tuple(options.sampling.logit_bias), "logit_bias")
        self.vocab.check_ids(options.limits.stop_token_ids, "stop_token_ids")
        prompt = self.prompt_ids(request)
        if not prompt:
            raise RequestError("the prompt is empty; send at least one token", field="prompt")
        if len(prompt) >= self.context_length:
            raise ContextLengthError(len(prompt), self.context_length)
        seed = secrets.randbelow(_SEEDS) if options.sampling.seed is None else options.sampling.seed
        request_id = f"{self._run}-{next(self._ids)}"
        strip = isinstance(request, ChatRequest) and self.vocab.adds_space_prefix
        sequences = []
        for index in range(options.n):
            own_seed = (seed + index) % _SEEDS
            sampler = Sampler(options, own_seed, self._space, self.vocab)
            sampler.read_prompt(prompt)
            sequences.append(
                EngineSequence(
                    request_id=request_id,
                    index=index,
                    token_ids=list(prompt),
                    options=options,
                    clock=SequenceClock(received),
                    sampler=sampler,
                    detokenizer=Detokenizer(strip_space_prefix=strip),
                    stops=StopStrings(options.limits.stop),
                )
            )
        started = Started(request_id, self.model_name, seed)
        return LocalStream(self._worker.submit(sequences), self._worker, started, options.n)

    def close(self) -> None:
        """Stop the engine; streams that still run get an EngineError, and so do later calls. Waits for one step."""
        self._worker.close()

    @property
    def is_idle(self) -> bool:
        """Nobody is being served: a snapshot."""
        return self._worker.is_idle

    def _chat_ids(self, messages: tuple[Message, ...]) -> list[int]:
        vocab = self.vocab
        rendered = self.template.render(messages)
        ids: list[int] = []
        for piece in split_control(rendered, vocab.control_tokens):
            ids += [piece] if isinstance(piece, int) else vocab.tokenize(piece)
        # Some templates write the begin-of-sequence token themselves.
        if vocab.adds_bos and ids[:1] != [vocab.bos_id]:
            ids.insert(0, vocab.bos_id)
        return ids


def _events(outputs: list[SequenceOutput]) -> Iterator[StreamEvent]:
    """Outputs of one choice that waited side by side leave as one delta, for a reader that was away."""
    for index, group in itertools.groupby(outputs, key=lambda output: output.index):
        run = list(group)
        last = run[-1]
        text, token_ids, logprobs = last.text, last.token_ids, last.logprobs
        if len(run) > 1:
            text = "".join(output.text for output in run)
            token_ids = tuple(itertools.chain.from_iterable(output.token_ids for output in run))
            logprobs = tuple(itertools.chain.from_iterable(output.logprobs for output in run))
        if text or logprobs or token_ids:
            yield TextDelta(text, index, token_ids, logprobs)
        if (end := last.end) is not None:
            yield Finished(end.reason, end.usage, end.timing, index, end.stop_sequence)
