"""Measurements, never tests: ratios of ours against the raw client loop, taken in one run on one machine."""
