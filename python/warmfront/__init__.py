"""warmfront: routes LLM requests by the KV cache that replicas really hold."""
