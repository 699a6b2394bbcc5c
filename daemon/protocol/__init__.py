"""What a launcher and its ranks tell each other."""
