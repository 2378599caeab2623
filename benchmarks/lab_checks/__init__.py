"""The lab held against others' simulators, published figures and real processes; `benchmarks/lab_check.py` runs it."""
