"""The daemon: HTTP and the socket."""
