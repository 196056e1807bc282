"""What vLLM's CPU build does not do by itself: experts of several ranks, adapters, seeds."""
