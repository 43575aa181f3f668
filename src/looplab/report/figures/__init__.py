"""Figures of the audit report, one file each; every function takes a result and returns a matplotlib Figure."""
