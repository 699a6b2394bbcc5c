"""One small class per compiler's cache: where it lives, what keys it, how it moves, how its use is proven."""
