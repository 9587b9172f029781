"""Evaluation over HTTP: replay of recorded agents, fidelity, capacity at equal memory, reports. Never imports the server."""
