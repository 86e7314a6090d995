"""The layer between a program and the machines: launchers, stores and the communicator."""
