"""One rank's process: its start, step by step, then serving."""
