"""`promoe serve`: Transformers' own server over one model whose experts do not fit in memory.

Transformers parses chats, streams and parses answers (`transformers.cli.serving`). What is here: which requests are let in
(`guard`, `requests`), whose turn it is (`turns`), and what Transformers' handlers are given to work with (`app`).
"""

from __future__ import annotations
