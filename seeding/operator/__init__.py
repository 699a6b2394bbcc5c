"""What people do with published artifacts: list, look at, pin, deny, copy, remove. No node needs it to start."""
