"""libllama's sampler chain over one row of logits."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legato.core.request import SamplingParams
from legato.llama.library import load_library
from legato.llama.vocab import Vocab

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_MIROSTAT_M = 100  # tokens that Mirostat 1 estimates from; the paper's value (arXiv:2007.14966)
_MIN_KEEP = 1


class SamplerSpace:
    """What all chains of one engine share: the sizes, the vocabulary, and the scratch array of candidates."""

    def __init__(self, vocab_size: int, context_length: int, vocab: Vocab | None = None) -> None:
        """vocab is needed for DRY only (its breakers are strings)."""
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.vocab = vocab
        self.ids = np.arange(vocab_size, dtype=np.int32)
        self.candidates = np.zeros(vocab_size, dtype=_CANDIDATE)
        self.array = load_library().llama_token_data_array()


class SamplerChain:
    """Stages in order, with their state: RNG, recent tokens, Mirostat's mu. One per sequence."""

    def __init__(self, params: SamplingParams, seed: int, space: SamplerSpace) -> None:
        """seed: 0 … 2**32 - 2. With temperature 0 the draw is the argmax after bias, penalties and DRY."""
        self._lib = load_library()
        self._space = space
        self._greedy = params.temperature == 0
        chain_params = self._lib.llama_sampler_chain_default_params()
        chain_params.no_perf = True
        self._chain = self._lib.llama_sampler_chain_init(chain_params)
        for stage in _Stages(params, seed, space).build():
            self._lib.llama_sampler_chain_add(self._chain, stage)

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Draw a token. logits: [vocab], not changed."""
        candidates, array = self._space.candidates, self._space.array
        candidates["id"] = self._space.ids
        candidates["logit"] = logits
        array.data = ctypes.cast(candidates.ctypes.data, type(array.data))
        array.size, array.selected, array.sorted = len(candidates), -1, False
        self._lib.llama_sampler_apply(self._chain, ctypes.byref(array))
        if self._greedy:
            return int(candidates["id"][candidates["logit"].argmax()])
        return int(array.data[array.selected].id)

    def accept(self, token: int) -> None:
        """Tell the stages that this token is now part of the text."""
        self._lib.llama_sampler_accept(self._chain, token)

    def close(self) -> None:
        if self._chain:
            self._lib.llama_sampler_free(self._chain)
            self._chain = None

    def __del__(self) -> None:
        if getattr(self, "_chain", None):
            self.close()


class _Stages:
    def __init__(self, params: SamplingParams, seed: int, space: SamplerSpace) -> None:
        self._lib = load_library()
        self._params = params
        self._seed = seed
        self._space = space

    def build(self) -> list[Any]:
        """The stages of these parameters, each owned by the chain they are added to."""
        p, lib = self._params, self._lib
        only: Sequence[str] = p.samplers
        if p.temperature == 0:
            only = ("penalties", "dry")
        elif p.mirostat:
            only = ("penalties", "dry", "temperature")
        makers = self._makers()
        stages = [self._logit_bias()] if p.logit_bias else []
        stages += [makers[name]() for name in p.samplers if name in only]
        if p.temperature == 0:
            return stages
        if p.mirostat == 1:
            args = (p.mirostat_tau, p.mirostat_eta, _MIROSTAT_M)
            return [*stages, lib.llama_sampler_init_mirostat(self._space.vocab_size, self._seed, *args)]
        if p.mirostat == 2:
            return [*stages, lib.llama_sampler_init_mirostat_v2(self._seed, p.mirostat_tau, p.mirostat_eta)]
        return [*stages, lib.llama_sampler_init_dist(self._seed)]

    def _makers(self) -> dict[str, Callable[[], Any]]:
        p, lib, seed = self._params, self._lib, self._seed
        return {
            "penalties": self._penalties,
            "dry": self._dry,
            "top_n_sigma": lambda: lib.llama_sampler_init_top_n_sigma(p.top_n_sigma),
            "top_k": lambda: lib.llama_sampler_init_top_k(p.top_k),
            "typical_p": lambda: lib.llama_sampler_init_typical(p.typical_p, _MIN_KEEP),
            "top_p": lambda: lib.llama_sampler_init_top_p(p.top_p, _MIN_KEEP),
            "min_p": lambda: lib.llama_sampler_init_min_p(p.min_p, _MIN_KEEP),
            "xtc": lambda: lib.llama_sampler_init_xtc(p.xtc_probability, p.xtc_threshold, _MIN_KEEP, seed),
            "temperature": lambda: lib.llama_sampler_init_temp_ext(
                p.temperature, p.dynatemp_range, p.dynatemp_exponent
            ),
        }

    def _look_back(self, tokens: int | None) -> int:
        """libllama allocates what it is told; no sequence is longer than the context."""
        longest = self._space.context_length
        return longest if tokens is None else min(tokens, longest)

    def _penalties(self) -> Any:
        p = self._params
        return self._lib.llama_sampler_init_penalties(
            self._space.vocab_size,
            self._look_back(p.repeat_last_n),
            p.repeat_penalty,
            p.frequency_penalty,
            p.presence_penalty,
        )

    def _dry(self) -> Any:
        p, vocab = self._params, self._space.vocab
        if p.dry_multiplier == 0 or vocab is None:
            return self._lib.llama_sampler_init_top_k(0)  # libllama's own no-op
        breakers = [breaker.encode() for breaker in p.dry_breakers]
        return self._lib.llama_sampler_init_dry(
            vocab.handle,
            p.dry_multiplier,
            p.dry_base,
            p.dry_allowed_length,
            self._look_back(p.dry_last_n),
            (ctypes.c_char_p * len(breakers))(*breakers),
            len(breakers),
        )

    def _logit_bias(self) -> Any:
        bias = self._params.logit_bias
        entries = (self._lib.llama_logit_bias * len(bias))()
        for entry, (token, value) in zip(entries, bias.items(), strict=True):
            entry.token, entry.bias = token, value
        return self._lib.llama_sampler_init_logit_bias(self._space.vocab_size, len(entries), entries)
