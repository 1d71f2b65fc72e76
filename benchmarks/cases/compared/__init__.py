"""Cases that compare this server with another build of it, with Redis or PostgreSQL, or with
servers that do only a part of its work.
"""
