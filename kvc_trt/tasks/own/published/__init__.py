"""Published data sets, from the files that the user has, as questions of one's own.

Each converter yields the lines of a file (`docs/data.md`). Prompts, lengths and scores are those of the data set, from
the YAML file beside the converter, so that figures can be compared with published ones.
"""
