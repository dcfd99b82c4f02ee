"""What a plan costs: time, bytes and peak memory, from shapes and sharding rules alone."""
