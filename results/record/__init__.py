"""Measurements as data: the schema of a run, its file, its environment, and its provenance."""
