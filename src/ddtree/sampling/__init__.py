"""The target's decoding rule as a pure function, and the noise that it reads by seed and position."""
