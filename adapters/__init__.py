"""The mask path: what makes a row a draft row."""
