"""From one row of logits to one token, and its log probabilities."""

import numpy as np

from legato.core.events import Logprob, TokenLogprobs
from legato.core.request import GenerationOptions, SamplingParams
from legato.engine.decoder import Logits, TokenTable
from legato.llama.samplers import SamplerChain, SamplerSpace


class Sampler:
    """One per sequence, with a random state of its own: neighbours cannot change a draw."""

    def __init__(self, options: GenerationOptions, seed: int, space: SamplerSpace, tokens: TokenTable) -> None:
        """Costly for some options (DRY), so not for the engine's thread. Raises what the options are wrong about."""
        limits = options.limits
        self._tokens = tokens
        self._num_alternatives = options.logprobs
        self._min_tokens = limits.min_tokens
        ends = tokens.end_ids if limits.ignore_eos or limits.min_tokens else ()
        self._never = np.array(ends if limits.ignore_eos else (), dtype=np.int64)
        self._not_yet = np.array([*ends, *limits.stop_token_ids], dtype=np.int64)
        # A plain argmax needs no chain, and costs a tenth of one.
        self._chain = None if _is_plain_greedy(options.sampling) else SamplerChain(options.sampling, seed, space)
        self._needs_history = needs_history(options.sampling)

    def read_prompt(self, token_ids: list[int]) -> None:
        """Penalties and DRY look back into the prompt too, as libllama's own programs have it."""
        if self._chain is not None and self._needs_history:
            for token in token_ids:
                self._chain.accept(token)

    def sample(self, logits: Logits, num_generated: int) -> tuple[int, TokenLogprobs | None]:
        """Draw the token after `num_generated` others. logits: [vocab]; end tokens may be masked in place."""
        scores = None if self._num_alternatives is None else _log_softmax(logits)
        logits[self._not_yet if num_generated < self._min_tokens else self._never] = -np.inf
        if self._chain is None:
            token = int(logits.argmax())
        else:
            token = self._chain.sample(logits)
            self._chain.accept(token)
        return token, None if scores is None else self._logprobs(scores, token)

    def close(self) -> None:
        if self._chain is not None:
            self._chain.close()

    def _logprobs(self, scores: Logits, token: int) -> TokenLogprobs:
        count = min(self._num_alternatives or 0, len(scores))
        if count == 0:
            return TokenLogprobs(self._logprob(scores, token), ())
        best = np.argpartition(scores, -count)[-count:]
        best = best[np.argsort(-scores[best], kind="stable")]
        return TokenLogprobs(self._logprob(scores, token), tuple(self._logprob(scores, int(t)) for t in best))

    def _logprob(self, scores: Logits, token: int) -> Logprob:
        raw = self._tokens.token_bytes(token)
        return Logprob(token, raw.decode("utf-8", "replace"), raw, float(scores[token]))


def needs_history(params: SamplingParams) -> bool:
    """Whether a draw depends on the tokens before it."""
    penalties = params.repeat_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
    return (penalties and params.repeat_last_n > 0 and "penalties" in params.samplers) or (
        params.dry_multiplier != 0 and "dry" in params.samplers
    )


def _is_plain_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0 and not params.logit_bias and not needs_history(params)


def _log_softmax(logits: Logits) -> Logits:
    shifted = logits.astype(np.float32) - logits.max()
    result: Logits = shifted - np.log(np.exp(shifted).sum())
    return result
