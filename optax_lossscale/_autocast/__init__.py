"""Any function in 16 bits: its products narrow, all else in float32 and kept narrow."""
