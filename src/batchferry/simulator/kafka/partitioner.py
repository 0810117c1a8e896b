"""Which partition a key belongs to (murmur2, seed 0x9747b28c), as every Kafka client's default partitioner says.

Written from the published algorithm (Kafka's ``Utils.murmur2``). The real client's room has a faster one; a test
holds both to the same answers.
"""

from __future__ import annotations

_M = 0x5BD1E995
_MASK = 0xFFFFFFFF


def partition_of(key: bytes, partitions: int) -> int:
    """The partition, of ``partitions`` many."""
    whole = len(key) & ~3
    h = 0x9747B28C ^ len(key)
    for at in range(0, whole, 4):
        k = int.from_bytes(key[at : at + 4], "little") * _M & _MASK
        k = (k ^ k >> 24) * _M & _MASK
        h = h * _M & _MASK ^ k
    if len(key) > whole:
        h = (h ^ int.from_bytes(key[whole:], "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    return ((h ^ h >> 15) & 0x7FFFFFFF) % partitions
