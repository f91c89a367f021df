"""Pure jitted functions of fixed-size arrays."""
