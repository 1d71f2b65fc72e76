"""Cases that compare this server with another one: another build of it, Redis."""
