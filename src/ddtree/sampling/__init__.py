"""The target's decoding rule as a pure function, and its noise by seed and position."""
