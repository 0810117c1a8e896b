"""Commands for people and scripts: one module a command, joined in ``main``.

This room turns flags into settings, calls ``app``, and shows what comes back: tables on a terminal, JSON elsewhere.
It must not know which Kafka client, HTTP client or database plays a part, and it decides nothing about requests,
batches or deadlines: those rules are ``domain``'s. ``demo`` is the one command with a story of its own.
"""
