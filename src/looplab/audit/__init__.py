"""The Depth Control Protocol: what the depth of a checkpoint is worth, with intervals (arXiv:2609.19934).

schedules   rules that edit a plan, words, identifiability, the minimal walk
documents   documents -> scored tokens, split by hash
self_tests  nine checks before any number
probes      refitted readouts and token metrics
decompose   contrasts, shares, equivalence, verdict
bootstrap   refits inside the draws
protocol    the order of work: `audit_model`
result      what comes out: `AuditResult`
"""
