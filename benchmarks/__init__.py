"""Measurements: splits of a machine, against each other and TRL; weight sync; memory of the log-probabilities."""
