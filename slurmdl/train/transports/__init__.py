"""What carries messages between ranks. A new transport is one file here that keeps to `transport.Transport`."""
