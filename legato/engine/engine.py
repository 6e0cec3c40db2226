"""Engine.step(): the recipe. Lives on one thread; see worker.py for the doors."""

import time
from collections.abc import Callable

from legato.core.errors import EngineError
from legato.core.events import FinishReason, TokenLogprobs
from legato.engine.config import EngineConfig
from legato.engine.cost_model import CallCost, CostModel
from legato.engine.decoder import Decoder, Logits, TokenTable
from legato.engine.prefix_cache import Plan, PrefixCache, Start
from legato.engine.ram_cache import RamCache
from legato.engine.scheduler import Scheduler
from legato.engine.sequence import Sequence, SequenceEnd, SequenceOutput, SequenceStatus
from legato.llama.batch import BatchRow

Deliver = Callable[[list[SequenceOutput]], None]


class Engine:
    """Continuous batching over one decoder. `clock` gives seconds; tests pass their own."""

    def __init__(
        self,
        decoder: Decoder,
        tokens: TokenTable,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        cost: CostModel | None = None,
    ) -> None:
        self._decoder = decoder
        self._tokens = tokens
        self._stall_timeout_s = config.stall_timeout_s
        ram = RamCache(config.cache_ram_mb * 2**20)
        self._cache = PrefixCache(decoder.num_slots, ram, can_rewind=decoder.can_rewind)
        self._cost = cost or CostModel()
        self._scheduler = Scheduler(self._cost, most_tokens=config.prefill_chunk, itl_target_ms=config.itl_target_ms)
        self._requests: dict[str, list[Sequence]] = {}  # not yet finished
        self._timed: set[Sequence] = set()  # those with a deadline
        self.clock = clock
        self.num_steps = 0

    @property
    def idle(self) -> bool:
        """Nothing to compute until a command comes or `next_deadline` passes."""
        can_admit = self._scheduler.num_waiting > 0 and self._cache.num_free > 0
        return not self._scheduler.has_work and not can_admit

    @property
    def next_deadline(self) -> float | None:
        """When an idle engine must look at its sequences again: a time limit or a stall timeout; None = never."""
        return min((self._deadline(seq)[0] for seq in self._timed), default=None)

    def submit(self, seq: Sequence) -> None:
        self._requests.setdefault(seq.request_id, []).append(seq)
        self._scheduler.add(seq)
        if seq.options.limits.max_time_s is not None:
            self._timed.add(seq)

    def cancel(self, request_id: str) -> list[SequenceOutput]:
        """End every sequence of a request. What was read stays in its slot as cache."""
        return [self._finish(seq, FinishReason.CANCELLED) for seq in list(self._requests.get(request_id, ()))]

    def park(self, request_id: str) -> None:
        """Its reader is behind: keep the slot, take no part in steps."""
        for seq in self._requests.get(request_id, ()):
            if seq.status is SequenceStatus.DECODE:
                seq.advance(SequenceStatus.PARKED)
                seq.clock.parked = self.clock()
                self._timed.add(seq)

    def resume(self, request_id: str) -> None:
        for seq in self._requests.get(request_id, ()):
            if seq.status is SequenceStatus.PARKED:
                seq.advance(SequenceStatus.DECODE)
                seq.clock.parked = None
                if seq.options.limits.max_time_s is None:
                    self._timed.discard(seq)

    def step(self, deliver: Deliver) -> None:
        """One decode call whose tokens go out at once, then one prefill call."""
        self.num_steps += 1
        if ended := self._expired():
            deliver(ended)
        self._admit()
        if rows := self._scheduler.decode_rows():
            self._forward(rows, self._cost.decode, deliver)
        if chunks := self._scheduler.prefill_rows():
            self._forward(chunks, self._cost.prefill, deliver)

    def check(self) -> None:
        """Raises EngineError when the accounts do not agree."""
        self._cache.check({seq.slot: seq for seq in self._scheduler.running if seq.slot is not None})
        open_sequences = sum(len(mine) for mine in self._requests.values())
        if open_sequences != len(self._scheduler.running) + self._scheduler.num_waiting:
            raise EngineError(f"{open_sequences} sequences are open, and others are scheduled")

    def _forward(self, rows: list[tuple[Sequence, BatchRow]], cost: CallCost, deliver: Deliver) -> None:
        begin = self.clock()
        logits = self._decoder.decode([row for _, row in rows])
        num_tokens = sum(len(row.tokens) for _, row in rows)
        depth = sum(row.start * len(row.tokens) for _, row in rows) / num_tokens
        cost.learn(num_tokens, depth, 1000 * (self.clock() - begin))
        for seq, row in rows:
            seq.num_computed_tokens += len(row.tokens)
        drawing = [seq for seq, row in rows if row.wants_logits]
        outputs = [self._advance(seq, logits[i]) for i, seq in enumerate(drawing)]
        if ready := [output for output in outputs if output is not None]:
            deliver(ready)

    def _expired(self) -> list[SequenceOutput]:
        now = self.clock()
        late = [(seq, reason) for seq in self._timed for at, reason in [self._deadline(seq)] if now >= at]
        outputs = []
        for seq, reason in late:
            if reason is FinishReason.CANCELLED:  # nobody reads this request: none of its answers is wanted
                outputs += self.cancel(seq.request_id)
            elif seq.status is not SequenceStatus.FINISHED:
                outputs.append(self._finish(seq, reason))
        return outputs

    def _deadline(self, seq: Sequence) -> tuple[float, FinishReason]:
        """When a timed sequence ends, and as what."""
        limit, parked = seq.options.limits.max_time_s, seq.clock.parked
        ends = [(seq.clock.received + limit, FinishReason.LENGTH)] if limit is not None else []
        if parked is not None:
            ends.append((parked + self._stall_timeout_s, FinishReason.CANCELLED))
        return min(ends, key=lambda end: end[0])

    def _admit(self) -> None:
        """Sequences that wait for a prefix that is being read let others pass."""
        for seq in self._scheduler.first_waiting(2 * self._decoder.num_slots):
            if self._cache.num_free == 0:
                return
            plan = self._cache.plan(seq)
            if plan is None:
                continue
            seq.num_cached_tokens = seq.num_computed_tokens = self._prepare(plan)
            seq.slot = plan.slot
            self._cache.occupy(plan.slot, seq)
            seq.clock.admitted = self.clock()
            seq.advance(SequenceStatus.PREFILL)
            self._scheduler.admit(seq)

    def _prepare(self, plan: Plan) -> int:
        """Carry out a plan; → tokens that the slot holds now. What cannot be moved is read again."""
        decoder, slot = self._decoder, plan.slot
        if plan.evicts:
            self._cache.evicted(slot, decoder.save(slot))
        holds = plan.start is Start.IN_PLACE
        if plan.start is Start.FORK and plan.source is not None:
            holds = decoder.fork(plan.source, slot)
        elif plan.start is Start.RESTORE and plan.entry is not None:
            holds = decoder.restore(slot, plan.entry.data)
        if holds and decoder.truncate(slot, plan.num_known):
            return plan.num_known
        decoder.clear(slot)
        return 0

    def _advance(self, seq: Sequence, logits: Logits) -> SequenceOutput | None:
        """Draw one token from the row that was just computed; None when there is nothing to send yet."""
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
            self._cache.release(seq.slot, seq.token_ids[: seq.num_computed_tokens])
        seq.sampler.close()
        self._timed.discard(seq)
        mine = self._requests[seq.request_id]
        mine.remove(seq)
        if not mine:
            del self._requests[seq.request_id]
        seq.advance(SequenceStatus.FINISHED)
        timing = seq.clock.timing(self.clock(), seq.num_generated)
        return self._output(seq, text, SequenceEnd(reason, seq.usage(), timing, stop_sequence))

    def _output(self, seq: Sequence, text: str, end: SequenceEnd | None) -> SequenceOutput:
        ids, logprobs = tuple(seq.unsent_ids), tuple(seq.unsent_logprobs)
        seq.unsent_ids.clear()
        seq.unsent_logprobs.clear()
        return SequenceOutput(seq.request_id, seq.index, text, ids, logprobs, end)
