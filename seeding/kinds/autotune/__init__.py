"""FlashInfer autotune tables: validated, seeded whole, and never able to poison a node."""
