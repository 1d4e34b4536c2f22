"""Benchmarks: each module prints a line a number and exits 1 when a goal is missed."""
