"""Faults of real fleets, made on purpose, on real processes and on virtual time."""
