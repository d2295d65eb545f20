"""Transports between ranks. A new one implements `transport.Transport`."""
