"""Load generators and clients, which run as processes of their own, and their controllers."""
