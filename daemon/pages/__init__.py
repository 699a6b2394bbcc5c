"""What a launcher shows: health, metrics, status."""
