"""Examples that run as they are."""
