"""The weight cache: a daemon owns a rank's weights, engines map them."""
