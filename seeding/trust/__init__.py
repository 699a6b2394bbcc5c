"""Who is believed, and what: signed manifests, keys, tokens, and what this node has seen go wrong."""
