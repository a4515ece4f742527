"""Probes: which functions are traced, how they are attached, and how their records are drained.

This package is the only importer of bcc; `table` is plain data and may be imported from anywhere.
"""
