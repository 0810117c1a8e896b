"""Pure decisions: times, accumulation, the batch machine, the ledger, classification, reconciliation.

This room must not know that a clock, an event loop, a disk, a network or an environment exists: the time
comes in as an argument, randomness as a seeded generator, and what is to be done goes out as values.
Of third-party code it may use only what computes (offset sets, JSON codecs, identifiers).
"""
