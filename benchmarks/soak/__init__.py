"""An hour of a server's life: mixed load, clients that leave, malformed requests, and processes that are killed."""
