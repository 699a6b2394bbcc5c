"""All ranks of a tuning group adopt one run, or none does."""
