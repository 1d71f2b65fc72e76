"""Views: records a second, read-your-writes, the cost for appends; and the same work written by
hand.
"""
