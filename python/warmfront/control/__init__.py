"""The control process: discovers and probes servers, tells the core the fleet, serves the admin API.

It is a child of the data process and talks to it over one Unix socket; when that closes, it ends. Nothing here is on
the path of a request: if it stalls or dies, the data process keeps the fleet it last heard of.
"""
