"""Sizes that bound memory: the runtime keeps them, and the memory model predicts with the same numbers."""

# Logits of at most this many bytes are kept for the backward pass; more are computed in chunks of this size, twice.
LOGITS_BUFFER_BYTES = 256 << 20
# Rows of logits that are worked on at once in lifted precision, so that they stay in the cache of a core.
LOGITS_BLOCK_BYTES = 1 << 20
# A weight gradient on its way to its buffer is made in blocks of this many elements.
GRADIENT_BLOCK_ELEMENTS = 1 << 22
# Most prompt tokens of one prefill pass, unless one prompt alone is longer.
PREFILL_TOKENS = 2048
# A message of a weight sync carries at most this much; two are in flight for each pair of devices and direction.
SYNC_BUCKET_BYTES = 16 << 20
# Shards of staged state: most bytes (unless a single piece has more), and how many a worker writes at the same time. On
# a disk one is synced while the next is written; to an object store several streams are faster than one.
SHARD_BYTES, SHARDS_IN_FLIGHT = 64 << 20, 2
REMOTE_SHARD_BYTES, REMOTE_SHARDS_IN_FLIGHT = 24 << 20, 4
MOST_SHARDS_IN_FLIGHT = max(SHARDS_IN_FLIGHT, REMOTE_SHARDS_IN_FLIGHT)
# What a worker holds of them on their way: a block each; for an object store up to 2.4 times the shards (measured).
STAGING_BUFFER_BYTES = SHARDS_IN_FLIGHT << 20
REMOTE_STAGING_BUFFER_BYTES = 5 * REMOTE_SHARDS_IN_FLIGHT * REMOTE_SHARD_BYTES // 2
# Ranks of one host sum through slots of shared memory, two a rank and group; what is at most so small goes whole.
REDUCE_SLOT_BYTES, REDUCE_WHOLE_BYTES = 2 << 20, 256 << 10
# What a worker's reader of staged state holds beside the tensors that it fills.
RESTORE_BUFFER_BYTES = 32 << 20


def reduce_slots_bytes(num_ranks: int, message_bytes: int) -> int:
    """Return the bytes of slots that a rank of a group touches while it sums messages of at most so many bytes.

    Small messages are read whole in the slots of all ranks; of large ones a rank fills its own slot and reads two
    parts of each other one: what it sums, and what that rank has summed.
    """
    if num_ranks == 1:
        return 0
    whole = num_ranks * min(message_bytes, REDUCE_WHOLE_BYTES)
    return 2 * max(whole, (3 * num_ranks - 2) * min(message_bytes, REDUCE_SLOT_BYTES) // num_ranks)


def gather_slots_bytes(num_ranks: int, part_bytes: int) -> int:
    """Return the bytes of slots that a rank of a group touches while it gathers parts of at most so many bytes."""
    return 2 * num_ranks * min(part_bytes, REDUCE_SLOT_BYTES) if num_ranks > 1 else 0


def logits_chunk_rows(num_rows: int, vocab_local: int, element_bytes: int) -> int:
    """Return how many rows of logits the log-probs of `num_rows` tokens hold at once."""
    return max(1, min(num_rows, LOGITS_BUFFER_BYTES // (vocab_local * element_bytes)))


def logits_bytes(num_rows: int, vocab_local: int, element_bytes: int) -> int:
    """Return the bytes of logits and their temporaries that the log-probs of `num_rows` tokens hold at their peak.

    At most LOGITS_BUFFER_BYTES (or one row), and three blocks in lifted precision.
    """
    if not num_rows or not vocab_local:
        return 0
    lifted_row = vocab_local * max(4, element_bytes)
    block = min(num_rows, max(1, LOGITS_BLOCK_BYTES // lifted_row)) * lifted_row
    return logits_chunk_rows(num_rows, vocab_local, element_bytes) * vocab_local * element_bytes + 3 * block
