"""What moves warmup caches between nodes and decides whether to believe them. Needs no GPU and no engine."""
