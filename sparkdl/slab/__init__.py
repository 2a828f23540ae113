"""Node-local memory: slab roots with a token, and pooled, stamped buffers inside them."""
