"""Where artifacts come from and are handed on: the chain of stores, and peers."""
