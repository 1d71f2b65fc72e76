"""The results as values, text, chart and document, and the description of the machine."""
