"""A small paged-attention engine in numpy: it shows what to call and when, on any machine."""
