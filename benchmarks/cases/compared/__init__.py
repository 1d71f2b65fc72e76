"""Cases that compare this server with another build of it, with Redis or with PostgreSQL."""
