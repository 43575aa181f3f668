"""Studies: one file per published claim set, rerun at a chosen scale, with a table of claims and a word for each.

base             Study, Arm, and the table of studies
rules            decision rules: intervals in, a word out
parts            what a claim looks at: a level, a difference, a contrast, a trend, a ratio
claims           from rows to words
matching         what arms must share
choice           which part of a study one call runs
predictions      what is written and hashed before the first arm runs
measured         quantities that an audit answers, as rows
trained          a training run as a study reads it
arms             training, auditing and grading one arm, each once
rows             finished arms on disk
forecast         what is missing and what it will cost
run              a whole study in one folder
dcp              the audit of all built-in checkpoints
depth_schedule   does the depth law of training make the readout part?
"""
