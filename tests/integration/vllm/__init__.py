"""`warmfront serve` in front of real vLLM servers on a CPU. Weights are random: nothing asserts on output words."""
