"""What can be seen from outside: the metric catalogue and the form of log lines."""
