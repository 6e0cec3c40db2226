"""libllama, wrapped once: arguments are checked before a call, return codes become types after it.

The only package that imports `llama_cpp`. Everything here runs on one thread at a time except `Vocab`, whose calls
libllama documents as thread-safe.
"""
