"""From one plan to another: the graph of primitives that leads there, its price and its execution."""
