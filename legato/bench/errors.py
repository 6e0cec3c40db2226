"""What can go wrong while something is measured."""

from legato.core.errors import LegatoError


class BenchError(LegatoError):
    """The measurement could not be made: no server, a broken stream, a server's refusal, or too little time."""

    code = "benchmark_failed"
    status_hint = 502
