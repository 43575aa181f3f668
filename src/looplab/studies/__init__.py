"""Studies: one file per published claim set, rerun at a chosen scale, with a table of claims and a word for each.

base             Study, Arm, and the table of studies
rules            decision rules: intervals in, a word out
predictions      what is written and hashed before the first arm runs
measured         quantities that an audit answers, as rows
arms             training and auditing one arm, each once
run              a whole study in one folder
dcp              the audit of all built-in checkpoints
depth_schedule   does the depth law of training make the readout part?
"""
