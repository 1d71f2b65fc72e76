"""Load generators and clients: processes beside the server, and how they are spoken to."""
