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
