"""What runs on a GPU node: the launcher, the rank daemons, the engines they serve, the command line."""
