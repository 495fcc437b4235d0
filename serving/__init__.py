"""Many requests at once: engine, batch files, server."""
