"""Benchmarks of streaming: of an open model in this process, or of any server that speaks the OpenAI protocol.

Words, with one meaning each:

- TTFT: the request was sent → the first text of the answer was here (not the headers, not an empty role frame).
- gap, or ITL: the time between two pieces of text of one stream.
- stall: the largest gap of a stream.
- goodput: requests per second that met their targets of TTFT and of the largest gap.

All times are measured by the reader, with one clock, and given in seconds.
"""

TTFT = "TTFT: from sending the request to the first text of the answer, as the reader sees it."
ITL = "ITL (gap): the time between two pieces of text of one stream."
STALL = "Stall: the largest gap of a stream."
