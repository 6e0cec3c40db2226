"""Model files: finding, checking, fetching and measuring them, before an engine sees them.

`registry` turns names into files, `gguf` checks them, `memory` says whether they fit, `hub` downloads them.
"""
