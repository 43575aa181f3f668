"""The rivals, one file each."""
