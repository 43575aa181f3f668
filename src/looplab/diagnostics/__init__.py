"""Diagnostics of one trained model, one file each."""
