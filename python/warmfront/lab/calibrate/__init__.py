"""`warmfront calibrate`: the constants of the latency model, fitted to timed probes of a live engine."""
