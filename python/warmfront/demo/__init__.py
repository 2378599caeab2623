"""`warmfront demo`: four embedded engines, the router, the same traffic twice, one table."""
