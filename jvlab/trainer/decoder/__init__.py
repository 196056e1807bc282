"""What a checkpoint computes, in JAX: configuration, layers, attention, memory, shardings. Imports layout."""
