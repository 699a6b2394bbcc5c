"""What `warmseed preload` can be told: flags, a TOML file, the environment, and the rules between them."""
