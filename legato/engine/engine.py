"""Engine.step(): the recipe. Lives on one thread; see worker.py for the doors."""

import time
from collections.abc import Callable

from legato.core.events import FinishReason, TokenLogprobs
from legato.engine.config import EngineConfig
from legato.engine.decoder import Decoder, Logits, TokenTable
from legato.engine.sampler import Sampler
from legato.engine.scheduler import Scheduler
from legato.engine.sequence import Sequence, SequenceEnd, SequenceOutput, SequenceStatus
from legato.engine.slots import SlotPool
from legato.llama.batch import BatchRow
from legato.llama.samplers import SamplerSpace

Deliver = Callable[[list[SequenceOutput]], None]


class Engine:
    """Continuous batching over one decoder. `clock` gives seconds; tests pass their own."""

    def __init__(
        self,
        decoder: Decoder,
        tokens: TokenTable,
        space: SamplerSpace,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decoder = decoder
        self._tokens = tokens
        self._space = space
        self._stall_timeout_s = config.stall_timeout_s
        self._slots = SlotPool(decoder.num_slots)
        self._scheduler = Scheduler(chunk_busy=config.prefill_chunk, chunk_idle=config.prefill_chunk_idle)
        self.clock = clock
        self.num_steps = 0

    @property
    def idle(self) -> bool:
        """Nothing to compute until a command comes or `next_deadline` passes."""
        can_admit = bool(self._scheduler.waiting) and self._slots.num_free > 0
        return not self._scheduler.has_work and not can_admit

    @property
    def next_deadline(self) -> float | None:
        """When an idle engine must look at its sequences again: a time limit or a stall timeout; None = never."""
        return min((at for seq in self._scheduler if (at := self._deadline(seq)) is not None), default=None)

    def submit(self, seq: Sequence) -> None:
        self._scheduler.waiting.append(seq)

    def cancel(self, request_id: str) -> list[SequenceOutput]:
        """End every sequence of a request. What was read stays in its slot as cache."""
        mine = [seq for seq in self._scheduler if seq.request_id == request_id]
        return [self._finish(seq, FinishReason.CANCELLED) for seq in mine]

    def park(self, request_id: str) -> None:
        """Its reader is behind: keep the slot, take no part in steps."""
        for seq in self._scheduler.running:
            if seq.request_id == request_id and seq.status is SequenceStatus.DECODE:
                seq.advance(SequenceStatus.PARKED)
                seq.clock.parked = self.clock()

    def resume(self, request_id: str) -> None:
        for seq in self._scheduler.running:
            if seq.request_id == request_id and seq.status is SequenceStatus.PARKED:
                seq.advance(SequenceStatus.DECODE)
                seq.clock.parked = None

    def step(self, deliver: Deliver) -> None:
        """One decode call whose tokens go out at once, then one prefill call."""
        self.num_steps += 1
        if ended := self._expired():
            deliver(ended)
        self._admit()
        if rows := self._scheduler.decode_rows():
            self._forward(rows, deliver)
        if chunks := self._scheduler.prefill_rows():
            self._forward(chunks, deliver)

    def check(self) -> None:
        """Raises EngineError when the accounts do not agree."""
        self._slots.check({seq.slot for seq in self._scheduler.running if seq.slot is not None})

    def _forward(self, rows: list[tuple[Sequence, BatchRow]], deliver: Deliver) -> None:
        logits = self._decoder.decode([row for _, row in rows])
        for seq, row in rows:
            seq.num_computed_tokens += len(row.tokens)
        drawing = [seq for seq, row in rows if row.wants_logits]
        outputs = [self._advance(seq, logits[i]) for i, seq in enumerate(drawing)]
        if ready := [output for output in outputs if output is not None]:
            deliver(ready)

    def _expired(self) -> list[SequenceOutput]:
        now = self.clock()
        late = [seq for seq in self._scheduler if (at := self._deadline(seq)) is not None and now >= at]
        return [
            self._finish(seq, FinishReason.CANCELLED if seq.status is SequenceStatus.PARKED else FinishReason.LENGTH)
            for seq in late
        ]

    def _deadline(self, seq: Sequence) -> float | None:
        limit = seq.options.limits.max_time_s
        ends = [] if limit is None else [seq.clock.received + limit]
        if seq.clock.parked is not None:
            ends.append(seq.clock.parked + self._stall_timeout_s)
        return min(ends, default=None)

    def _admit(self) -> None:
        waiting = self._scheduler.waiting
        while waiting and (found := self._slots.acquire(waiting[0].token_ids)) is not None:
            seq = waiting.popleft()
            seq.slot, num_known = found
            if num_known == 0 or not self._decoder.truncate(seq.slot, num_known):
                self._decoder.clear(seq.slot)
                num_known = 0
            seq.num_cached_tokens = seq.num_computed_tokens = num_known
            seq.sampler = Sampler(seq.options, seq.seed, self._space, self._tokens)
            seq.sampler.read_prompt(seq.token_ids)
            seq.clock.admitted = self.clock()
            seq.advance(SequenceStatus.PREFILL)
            self._scheduler.running.append(seq)

    def _advance(self, seq: Sequence, logits: Logits) -> SequenceOutput | None:
        """Draw one token from the row that was just computed; None when there is nothing to send yet."""
        assert seq.sampler is not None  # admitted sequences have one
        if seq.status is SequenceStatus.PREFILL:
            seq.advance(SequenceStatus.DECODE)
        token, logprobs = seq.sampler.sample(logits, seq.num_generated)
        now = self.clock()
        limits = seq.options.limits
        if self._tokens.is_end(token):
            return self._finish(seq, FinishReason.STOP)
        if token in limits.stop_token_ids:
            return self._finish(seq, FinishReason.STOP, stop_sequence=token)
        text = self._append(seq, token, logprobs)
        seq.clock.saw_token(now)
        if text:
            seq.clock.saw_text(now)
        if seq.stops.matched is not None:
            return self._finish(seq, FinishReason.STOP, text, seq.stops.matched)
        out_of_time = limits.max_time_s is not None and now >= seq.clock.received + limits.max_time_s
        if out_of_time or seq.num_generated == limits.max_tokens or len(seq.token_ids) >= self._decoder.context_length:
            return self._finish(seq, FinishReason.LENGTH, text)
        return self._output(seq, text, None) if text or logprobs else None

    def _append(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> str:
        seq.token_ids.append(token)
        seq.unsent_ids.append(token)
        if logprobs is not None:
            seq.unsent_logprobs.append(logprobs)
        text = seq.detokenizer.push(self._tokens.token_bytes(token))
        # Until min_tokens the answer may not end, so stop strings are not looked for.
        return text if seq.num_generated < seq.options.limits.min_tokens else seq.stops.push(text)

    def _finish(
        self, seq: Sequence, reason: FinishReason, text: str = "", stop_sequence: str | int | None = None
    ) -> SequenceOutput:
        if seq.stops.matched is None:
            tail = seq.stops.push(seq.detokenizer.flush()) + seq.stops.flush()
            if tail and not text:
                seq.clock.saw_text(self.clock())
            text += tail
        self._scheduler.remove(seq)
        if seq.slot is not None:
            self._slots.release(seq.slot, seq.token_ids[: seq.num_computed_tokens])
        if seq.sampler is not None:
            seq.sampler.close()
        seq.advance(SequenceStatus.FINISHED)
        timing = seq.clock.timing(self.clock(), seq.num_generated)
        return self._output(seq, text, SequenceEnd(reason, seq.usage(), timing, stop_sequence))

    def _output(self, seq: Sequence, text: str, end: SequenceEnd | None) -> SequenceOutput:
        ids, logprobs = tuple(seq.unsent_ids), tuple(seq.unsent_logprobs)
        seq.unsent_ids.clear()
        seq.unsent_logprobs.clear()
        return SequenceOutput(seq.request_id, seq.index, text, ids, logprobs, end)
