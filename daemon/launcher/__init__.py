"""The parent of a node's ranks: starts, watches, stops and reaps them."""
