"""One compact decoder for the Llama family, sharded over tensor-parallel ranks and pipeline stages."""
