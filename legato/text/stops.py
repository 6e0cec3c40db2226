"""Stop strings over streamed text."""

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string whose match ends first (of two that end together, the longer), however the text is cut.

    Text before the match comes out, nothing of it or after it ever does. Held back is only the tail that may still grow
    into a match.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that is safe to show. After a match `matched` is set and nothing comes out any more."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if hits:
            _, at, self.matched = min(hits)
            self._held = ""
            return held[:at]
        cut = len(held) - self._longest_open_match(held)
        self._held = held[cut:]
        return held[:cut]

    def flush(self) -> str:
        """The answer ended without the match: what was held belongs to it."""
        held, self._held = self._held, ""
        return held

    def _longest_open_match(self, text: str) -> int:
        """Length of the longest tail of the text that begins some stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for size in range(min(longest, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
