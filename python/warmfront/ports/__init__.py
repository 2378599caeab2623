"""Where events come from and where commands go: live, inline, simulated, replayed. One router behind all of them."""
