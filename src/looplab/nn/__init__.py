"""Blocks that know nothing about repetition. Each module is imported by name; this package imports none of them, so
`looplab.nn.cost` stays free of PyTorch."""
