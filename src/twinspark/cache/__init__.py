"""State of requests: pages, window rings, compressor rings; addressed by absolute position."""
