"""One file per architecture, one contract for all."""
