"""The command line ``hermes-rl``."""
